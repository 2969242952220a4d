"""The process of a coordinator: it starts, answers, stops cleanly, and reports start failures."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import pytest

import logdb
from logdb import wire
from logdb.embedded import Coordinator
from logdb.errors import NoCheckpointError
from logdb.records import KeyRead
from tests.unit.logdb.harness import SESSION, commit
from tests.waiting import wait_until
from ziplog.cli.options import DEFAULT_BOOTSTRAP
from ziplog.deploy.new_shard import free_ports
from ziplog.errors import ConfigError, DeadlineError, UnavailableError
from ziplog.local import Cluster
from ziplog.runtime.transport import Transport
from ziplog.types import RecordId
from ziplog.wire import encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import ziplog

DEADLINE_S = 30.0
AGAIN_NS = 200_000_000
SERVER = b"server"


class Process:
    """One coordinator; it ends with the block."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.running = subprocess.Popen(
            [sys.executable, "-m", "logdb", *arguments],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.kill()
        self.running.communicate(timeout=DEADLINE_S)

    def ready(self) -> str:
        """Return where it listens, once it answers."""
        assert self.running.stdout is not None
        line = self.running.stdout.readline()
        assert line.startswith("logdb ready at "), line
        return line.split()[-1]

    def end(self) -> tuple[int, str]:
        """Return its exit code, and what it said on stderr."""
        _, stderr = self.running.communicate(timeout=DEADLINE_S)
        return self.running.returncode, stderr

    def stop(self) -> tuple[int, str]:
        self.running.terminate()
        return self.end()


class Client:
    """Speaks to one coordinator, as raw as can be."""

    def __init__(self, endpoint: str) -> None:
        self.transport = Transport()
        self.transport.connect(SERVER, endpoint)
        self.numbers = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()

    def expect(self, kind: type, again: wire.PendingQuery | None = None) -> Any:
        """Return the next message of this kind; or, if a question is asked, the answer to it."""
        number = getattr(again, "request", None)
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            if again is not None:
                self.transport.send(SERVER, encode(again))
            self.transport.wait(AGAIN_NS)
            while (received := self.transport.receive()) is not None:
                message = wire.decode(received[1])
                answered = getattr(message, "request", None)
                # A repeated request gets a second reply.
                if isinstance(message, kind) and number in {None, answered}:
                    return message
        raise AssertionError(f"no {kind.__name__}")

    def open(self) -> wire.Opened:
        opened: wire.Opened = self.expect(wire.Opened, wire.Open(0, next(self.numbers), SESSION))
        return opened

    def get(self, key: bytes, *, at_least: int = 0, fresh: bool = False) -> wire.KeyResult:
        message = wire.Get(0, next(self.numbers), [key], at_least, fresh, [], [])
        found: wire.KeyResult = self.expect(wire.Got, message).found[0]
        return found

    def status(self) -> Any:
        received = self.expect(wire.StatusReply, wire.Status(0, next(self.numbers)))
        return json.loads(received.document)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), shards=2) as made:
        yield made


@pytest.fixture
def log(cluster: Cluster) -> Iterator[ziplog.Log]:
    with cluster.connect() as made:
        yield made


#: One number for every transaction of these tests: they share a log.
numbers = itertools.count(1)


def put(log: ziplog.Log, key: bytes, value: bytes, **fields: Any) -> tuple[int, RecordId]:
    number = next(numbers)
    return number, log.insert_after(commit(number, {key: value}, **fields))


def test_a_process_decides_answers_and_stops_cleanly(cluster: Cluster, log: ziplog.Log) -> None:
    with Process("--bootstrap", cluster.endpoint, "--port", "0") as process:
        with Client(process.ready()) as client:
            opened = client.open()
            assert cluster.endpoint.split(",")[0] in opened.endpoints
            number, rid = put(log, b"k", b"v")
            decided = client.expect(wire.Decided)
            assert (decided.number, decided.outcome) == (number, "committed")
            assert decided.position == rid
            assert client.get(b"k").value == b"v"
            number, _ = put(log, b"k", b"w", reads=[(b"k", 0)])
            decided = client.expect(wire.Decided)
            assert (decided.outcome, decided.conflicts) == ("conflict", [b"k"])
            message = wire.Validate(0, 99, [KeyRead(b"k", rid.gsn), KeyRead(b"x", 1)], [])
            assert client.expect(wire.Validated, message).conflicts == [b"x"]
            assert client.status()["commits"] == 1
        code, stderr = process.stop()
        assert code == 0, stderr
        # A long start reports its progress too.
        expected = ["event=listening", "event=ready", "event=stopped"]
        assert [word for word in stderr.split() if word in expected] == expected


def test_a_second_coordinator_has_the_same_state_and_fresh_reads(
    cluster: Cluster, log: ziplog.Log
) -> None:
    arguments = ("--bootstrap", cluster.endpoint, "--port", "0", "--no-checkpoints")
    with (
        Process(*arguments) as first,
        Process(*arguments) as second,
        Client(first.ready()) as one,
        Client(second.ready()) as other,
    ):
        one.open()
        for turn in range(20):
            _, rid = put(log, b"fresh", b"%d" % turn)
            assert one.expect(wire.Decided).position == rid
            assert other.get(b"fresh", fresh=True).value == b"%d" % turn


def test_a_taken_port_is_one_line_and_exit_code_1(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Process("--bootstrap", cluster.endpoint, "--port", str(port)) as process:
            code, stderr = process.end()
    assert code == 1
    (line,) = stderr.splitlines()
    assert f"127.0.0.1:{port}" in line


def test_an_unreachable_log_is_exit_code_1() -> None:
    unreachable = f"127.0.0.1:{next(free_ports(1, '127.0.0.1'))}"
    with Process("--bootstrap", unreachable, "--port", "0", "--connect-timeout", "0.3") as process:
        code, stderr = process.end()
    assert code == 1
    assert stderr.splitlines()[-1].startswith(
        f"logdb: no membership service answered at {unreachable}"
    )


def test_the_log_comes_from_the_option_or_the_environment(cluster: Cluster) -> None:
    with Process("--port", "0", ZIPLOG_BOOTSTRAP=cluster.endpoint) as process:
        assert process.ready()
    there, elsewhere = (f"127.0.0.1:{port}" for port in free_ports(2, "127.0.0.1"))
    late = ("--port", "0", "--connect-timeout", "0.3")
    with Process(*late, "--bootstrap", there, ZIPLOG_BOOTSTRAP=elsewhere) as process:
        code, stderr = process.end()
    assert code == 1
    assert f"answered at {there}" in stderr


def test_without_both_the_log_has_the_default_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZIPLOG_BOOTSTRAP", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    shown = subprocess.run(
        [sys.executable, "-m", "logdb", "--help"], check=True, capture_output=True, text=True
    )
    assert f"(default: {DEFAULT_BOOTSTRAP})" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--bootstrap", "nonsense"], "bootstrap"),
        (["--bootstrap", "127.0.0.1:1", "--cache-mb", "-1"], "--cache-mb is -1"),
        (["--bootstrap", "127.0.0.1:1", "--checkpoint-every", "0"], "--checkpoint-every is 0"),
        (["--bootstrap", "127.0.0.1:1", "--port", "99999"], "--port is 99999; it must be"),
        (["--bootstrap", "127.0.0.1:1", "--host", "0.0.0.0"], "unless --insecure is given"),
        (["--bootstrap", "127.0.0.1:1", "--connect-timeout", "-1"], "--connect-timeout is -1"),
    ],
)
def test_bad_usage_is_exit_code_2(arguments: list[str], text: str) -> None:
    with Process(*arguments) as process:
        code, stderr = process.end()
    assert code == 2
    assert text in stderr


def test_help_lists_the_options() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "logdb", "--help"], check=True, capture_output=True, text=True
    )
    for option in ("--bootstrap", "--port", "--host", "--no-checkpoints", "--checkpoint-every"):
        assert option in shown.stdout
    assert "(default: 7500)" in shown.stdout


# --- inside a program ---


def test_an_embedded_coordinator_answers_until_it_is_closed(
    cluster: Cluster, log: ziplog.Log
) -> None:
    with Coordinator(log) as coordinator, Client(coordinator.endpoint) as client:
        client.open()
        _, rid = put(log, b"inside", b"v")
        assert client.expect(wire.Decided).position == rid
        assert client.get(b"inside").value == b"v"
        assert client.status()["endpoint"] == coordinator.endpoint
    coordinator.close()
    assert coordinator.failure is None
    # Its port is free again.
    host, _, port = coordinator.endpoint.rpartition(":")
    with Coordinator(log, host=host, port=int(port), checkpoints=False) as another:
        with Client(another.endpoint) as client:
            assert client.get(b"inside").value == b"v"
        with pytest.raises(UnavailableError, match="in use"):
            Coordinator(log, port=int(port))


def test_a_local_database_has_its_own_coordinator(log: ziplog.Log) -> None:
    threads = {thread.name for thread in threading.enumerate()}
    with logdb.local(log, checkpoints=False) as database:
        position = database.put("local", {"is": "here"})
        assert database.get("local") == {"is": "here"}
        assert log.read_record(position).payload
        assert "logdb" in {thread.name for thread in threading.enumerate()}
    assert {thread.name for thread in threading.enumerate()} == threads


def test_a_replay_beyond_the_timeout_raises() -> None:
    unreachable = f"127.0.0.1:{next(free_ports(1, '127.0.0.1'))}"
    with pytest.raises(DeadlineError, match=r"timed out .* replay the log: it is at 0 of 0"):
        Coordinator(unreachable, ready_timeout=0)


def test_a_coordinator_accepts_a_log_or_its_addresses(cluster: Cluster, log: ziplog.Log) -> None:
    _, rid = put(log, b"where", b"v")
    for given in (cluster.endpoint, cluster.endpoint.split(",")):
        with (
            Coordinator(given, checkpoints=False) as coordinator,
            Client(coordinator.endpoint) as client,
        ):
            assert client.get(b"where", at_least=rid.gsn).value == b"v"
    with pytest.raises(ConfigError, match="log is 'nonsense'"):
        Coordinator("nonsense")
    for wrong in (7, None):
        with pytest.raises(TypeError, match=r"ziplog\.Log or 'host:port'"):
            Coordinator(wrong)  # type: ignore[arg-type]


def test_only_an_insecure_coordinator_listens_beyond_loopback(log: ziplog.Log) -> None:
    with pytest.raises(ConfigError, match="unless insecure=True is given"):
        Coordinator(log, host="0.0.0.0")
    with Coordinator(log, host="0.0.0.0", insecure=True, checkpoints=False) as coordinator:
        assert coordinator.endpoint.startswith("0.0.0.0:")


def test_an_invalid_argument_is_named(cluster: Cluster) -> None:
    unreachable = f"127.0.0.1:{next(free_ports(1, '127.0.0.1'))}"
    with pytest.raises(UnavailableError, match=f"answered at {unreachable}"):
        Coordinator(unreachable, connect_timeout=0.3)
    for name in ("connect_timeout", "ready_timeout", "cache_mb", "checkpoint_every", "port"):
        with pytest.raises(ConfigError, match=f"{name} is -1"):
            Coordinator(cluster.endpoint, **{name: -1})


def test_a_log_that_does_not_reply_is_logged_without_the_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unreachable = f"127.0.0.1:{next(free_ports(1, '127.0.0.1'))}"
    with pytest.raises(UnavailableError):
        Coordinator(unreachable, connect_timeout=0.3)
    (line,) = (line for line in caplog.messages if line.startswith("coordinator stopped"))
    assert unreachable in line
    assert "state=" not in line


def test_a_log_that_cannot_be_replayed_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        Cluster(tmp_path_factory.mktemp("trimmed"), shards=1) as cluster,
        cluster.connect() as log,
    ):
        put(log, b"k", b"v")
        _, rid = put(log, b"k", b"w")
        log.trim(rid)
        with pytest.raises(NoCheckpointError):
            Coordinator(log)
        with Process("--bootstrap", cluster.endpoint, "--port", "0") as process:
            code, stderr = process.end()
        assert code == 1
        assert "checkpoint" in stderr.splitlines()[-1]


def test_foreign_record_is_kept_and_does_not_stop_the_cleaner(tmp_path: Path) -> None:
    with (
        Cluster(tmp_path, shards=1) as cluster,
        cluster.connect() as log,
        Coordinator(log, checkpoint_every=50) as coordinator,
        Client(coordinator.endpoint) as client,
    ):
        put(log, b"before", b"v")
        foreign = log.insert_after(b"by mistake", key=b"of another program")

        def has_cleaned() -> bool:
            put(log, b"key", b"v" * 1_000_000)  # a round is due after 64 MiB
            return bool(client.status()["cleaner"]["trimmed"] > foreign.gsn)

        wait_until(has_cleaned, "the log is trimmed behind the foreign record")
        document = client.status()
        assert document["first_foreign"] == foreign.gsn
        assert document["cleaner"]["failed"] == 0
        assert document["cleaner"]["copied"] >= 1
        start = RecordId(document["cleaner"]["trimmed"], 0)
        kept = [record for record in log.subscribe(start, follow=False) if record.key is not None]
        assert (b"by mistake", b"of another program") in [(r.payload, r.key) for r in kept]
        assert client.get(b"before").value == b"v"
