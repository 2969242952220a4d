"""Fault injection: each fault affects the named nodes, until it is healed."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faults as command
import pytest
from fault_injection import control, layer
from fault_injection.control import ActiveFaults, FaultSource
from fault_injection.nodes import LAUNCHER, Nodes
from fault_injection.schedule import DAMAGE, KILL_GROUP, KINDS, Chaos, Fault, faults, inject

import ziplog
from tests.sim.cluster import config_of
from tests.sim.plan import draw
from tests.waiting import wait_until
from ziplog.config_text import dump
from ziplog.deploy.supervisor import CLUSTER_FILE
from ziplog.errors import ConfigError, UnavailableError
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.runtime.transport import Transport

DEADLINE_S = 20.0


# --- the control file ----------------------------------------------------------------------------


def test_a_process_sees_its_faults(tmp_path: Path) -> None:
    source = FaultSource(tmp_path, "a")
    assert source.current() == ActiveFaults()
    current = ActiveFaults(
        frozenset({"b"}), no_clients=True, send_ms=2.5, flush_ms=1.0, disk_bytes=0
    )
    control.write(tmp_path, "a", current)
    control.write(tmp_path, "b", ActiveFaults(send_ms=1.0))
    wait_until(lambda: source.current() == current, "it sees it")
    control.write(tmp_path, "a", ActiveFaults())
    assert not control.path_of(tmp_path, "a").exists()
    wait_until(lambda: source.current() == ActiveFaults(), "it is well again")


# --- the layer inside a process ------------------------------------------------------------------


class Three:
    """Two nodes with the layer, "a" and "b", and a client without."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        #: Messages that b received during another wait.
        self.heard: list[bytes] = []
        #: Number of questions; each may be sent several times.
        self.asked: Counter[bytes] = Counter()
        self.sources = {name: FaultSource(directory, name) for name in "ab"}
        self.a = layer._transport(self.sources["a"], "a")("127.0.0.1:0")
        self.b = layer._transport(self.sources["b"], "b")("127.0.0.1:0")
        self.client = layer.transport.Transport()
        assert self.b.endpoint is not None
        for transport in (self.a, self.client):
            transport.connect(b"b", self.b.endpoint)

    def close(self) -> None:
        for transport in (self.a, self.b, self.client):
            transport.close()

    def current(self, node: str, current: ActiveFaults) -> None:
        """Let this be wrong with a node; returns when it knows."""
        control.write(self.directory, node, current)
        wait_until(lambda: self.sources[node].current() == current, "it knows")

    def ask(self, asking: Transport, question: bytes) -> tuple[bytes, bytes]:
        """Ask b until it hears; return from where it heard, and what."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self.asked[question] += asking.send(b"b", question)
            self.b.wait(10_000_000)
            while (received := self.b.receive()) is not None:
                if received[1] == question:
                    return received
                self.heard.append(received[1])
        raise AssertionError("b never heard")


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Three]:
    made = Three(tmp_path)
    yield made
    made.close()


def heard_before(transport: Transport, marker: bytes) -> list[bytes]:
    """Return the frames that come before one of a connection."""
    frames: list[bytes] = []

    def is_there() -> bool:
        transport.wait(1_000_000)
        while (received := transport.receive()) is not None:
            if received[1] == marker:
                return True
            frames.append(received[1])
        return False

    wait_until(is_there, f"{marker!r} comes")
    return frames


def test_an_introduction_frame_does_not_reach_the_node(three: Three) -> None:
    src, frame = three.ask(three.a, b"hello")
    assert (src[0], frame) == (0, b"hello")
    assert three.b._peers == {src: "a"}
    src, _ = three.ask(three.client, b"a client")
    assert src not in three.b._peers


def test_a_cut_drops_messages_to_another_node(three: Three) -> None:
    three.ask(three.a, b"hello")
    three.current("a", ActiveFaults(frozenset({"b"})))
    assert three.a.send(b"b", b"lost")
    three.current("a", ActiveFaults(frozenset({"c"})))
    three.a.send(b"b", b"healed")
    assert b"lost" not in heard_before(three.b, b"healed")


def test_a_cut_drops_responses_on_the_others_connection(three: Three) -> None:
    route, _ = three.ask(three.a, b"hello")
    client, _ = three.ask(three.client, b"a client")
    three.current("b", ActiveFaults(frozenset({"a"})))
    assert three.b.send(route, b"lost")
    three.b.send(client, b"to a client")
    heard_before(three.client, b"to a client")
    three.current("b", ActiveFaults())
    three.b.send(route, b"healed")
    assert b"lost" not in heard_before(three.a, b"healed")


def test_a_node_cut_from_clients_receives_from_nodes_only(three: Three) -> None:
    three.ask(three.a, b"hello")
    client, _ = three.ask(three.client, b"a client")
    three.current("b", ActiveFaults(no_clients=True))
    assert three.b.send(client, b"lost")
    for _ in range(20):
        three.client.send(b"b", b"lost too")
    three.ask(three.a, b"nodes are heard")
    faulty: Any = three.b
    heard = []

    def all_came() -> bool:
        faulty.wait(1_000_000)
        while (received := faulty.receive()) is not None:
            heard.append(received[1])
        came_before = 1 + [*heard, *three.heard].count(b"a client")
        return bool(faulty.swallowed + came_before == 20 + three.asked[b"a client"])

    wait_until(all_came, "all came and were swallowed")
    assert b"lost too" not in [*heard, *three.heard]
    three.current("b", ActiveFaults())
    three.b.send(client, b"answer")
    assert b"lost" not in heard_before(three.client, b"answer")


def test_with_random_loss_some_messages_arrive(three: Three) -> None:
    three.ask(three.a, b"hello")
    three.current("a", ActiveFaults(lost_percent=50.0))
    for number in range(200):
        assert three.a.send(b"b", b"%d" % number)
    three.current("a", ActiveFaults())
    three.a.send(b"b", b"all")
    came = [int(frame) for frame in heard_before(three.b, b"all") if frame.isdigit()]
    assert 50 < len(came) < 150
    assert came == sorted(came)


def test_only_messages_to_the_named_nodes_are_late(three: Three) -> None:
    three.ask(three.a, b"hello")
    three.current("a", ActiveFaults(send_ms=60_000.0, late_to=frozenset({"c"})))
    three.ask(three.a, b"soon")
    assert not three.a._late
    three.current("a", ActiveFaults(send_ms=60_000.0, late_to=frozenset({"b"})))
    three.a.send(b"b", b"late")
    assert [frame for _, _, frame in three.a._late] == [b"late"]


def test_the_command_delays_messages_to_a_region(tmp_path: Path) -> None:
    config = config_of(draw(4, has_regions=True))
    (tmp_path / CLUSTER_FILE).write_text(dump(config))
    arguments = ["--data-dir", str(tmp_path), "slow", "shard-0-0", "--send-ms", "40", "--to"]
    assert command.main([*arguments, "us"]) == 0
    current = control.read(tmp_path, "shard-0-0")
    assert current.late_to == {node.name for node in config.nodes if node.region == "us"} != set()
    assert (current.delay_ms("mms-2"), current.delay_ms("mms-0"), current.delay_ms(None)) == (
        40,
        0,
        0,
    )
    assert command.main([*arguments, "mars"]) == 2


def test_delayed_messages_stay_in_order(three: Three) -> None:
    three.ask(three.a, b"hello")
    three.current("a", ActiveFaults(send_ms=30.0))
    sent = [b"%d" % number for number in range(5)]
    for frame in sent:
        three.a.send(b"b", frame)
    heard: list[bytes] = []

    def hear() -> bool:
        three.a.wait(1_000_000)  # which lets go of what is due
        three.b.poll()
        while (received := three.b.receive()) is not None:
            heard.append(received[1])
        return len([frame for frame in heard if frame in sent]) == len(sent)

    wait_until(hear, "all of it comes")
    assert [frame for frame in heard if frame in sent] == sent
    assert not three.a._late


def test_a_full_disk_accepts_the_allowed_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", os.pwritev)
    source = FaultSource(tmp_path, "a")
    layer._full_disk(source)
    with (tmp_path / "file").open("wb") as file:
        assert os.pwritev(file.fileno(), [b"1234", b"5678"], 0) == 8
        control.write(tmp_path, "a", ActiveFaults(disk_bytes=4))
        wait_until(lambda: source.current().disk_bytes == 4, "it knows")
        assert os.pwritev(file.fileno(), [b"1234"], 8) == 4
        with pytest.raises(OSError, match="No space left"):
            os.pwritev(file.fileno(), [b"5"], 12)
        control.write(tmp_path, "a", ActiveFaults())
        wait_until(lambda: source.current().disk_bytes is None, "it has room again")
        assert os.pwritev(file.fileno(), [b"56"], 12) == 2


# --- chance --------------------------------------------------------------------------------------


class Recorded:
    """Nodes that record the actions on them."""

    names = ("mms-0", "shard-0-0", "shard-0-1", "shard-1-0", "shard-1-1")

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []
        self.healed = False

    config: Any = None

    def group_of(self, node: str) -> tuple[str, ...]:
        return tuple(name for name in self.names if name[:7] == node[:7])

    def __getattr__(self, kind: str) -> Any:
        return lambda node, *_, **__: self.done.append((kind, node)) or ""

    def heal_all(self) -> None:
        self.healed = True


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    class Shard:
        def __init__(self, *names: str) -> None:
            self.replicas = [type("Node", (), {"name": name}) for name in names]

    class Config:
        shards = (Shard("shard-0-0", "shard-0-1"), Shard("shard-1-0", "shard-1-1"))

    monkeypatch.setattr(Recorded, "config", Config)
    return Recorded()


def test_a_seed_determines_the_schedule(recorded: Any) -> None:
    def first(seed: int) -> list[tuple[float, Fault]]:
        return [fault for fault, _ in zip(faults(recorded, seed), range(200), strict=False)]

    assert first(3) == first(3)
    assert first(3) != first(4)
    assert {fault.kind for _, fault in first(3)} == set(KINDS)
    storage_only = {"fill-disk", "cut-clients"}
    assert all(f.node.startswith("shard") for _, f in first(3) if f.kind in storage_only)
    for _, fault in first(3):
        assert fault.other in recorded.group_of(fault.node)


@pytest.mark.parametrize("kind", [*KINDS, *DAMAGE])
def test_every_kind_of_fault_is_executed(recorded: Any, kind: str) -> None:
    inject(recorded, Fault(kind, "shard-0-1", "shard-0-0", 5, 1.0))
    ((_, node),) = recorded.done
    assert node == "shard-0-1"


def test_a_group_is_killed_as_one(recorded: Any) -> None:
    inject(recorded, Fault(KILL_GROUP, "shard-0-1", "shard-0-0", 5, 1.0))
    assert recorded.done == [("kill_all", ("shard-0-0", "shard-0-1"))]


def test_a_group_with_a_failed_member_gets_no_fault(recorded: Any) -> None:
    said: list[str] = []
    unhealthy = {"shard-0-1": "limbo", "mms-0": "down"}
    chaos = Chaos(recorded, 1, ["kill"], lambda: unhealthy, said.append)
    end = time.monotonic() + DEADLINE_S
    chaos._inject(Fault("kill", "shard-1-0", "", 0, 0.0), end, lambda: None)
    assert recorded.done == [("kill", "shard-1-0")]
    # In vain: it waits until there is no time any more.
    chaos._inject(Fault("kill", "shard-0-0", "", 0, 0.0), time.monotonic(), lambda: None)
    assert recorded.done == [("kill", "shard-1-0")]
    assert "left out" in said[-1]
    unhealthy = {"shard 0": "recovering"}
    chaos._inject(Fault("kill", "shard-0-0", "", 0, 0.0), time.monotonic(), lambda: None)
    unhealthy = {}
    chaos._inject(Fault("kill", "shard-0-0", "", 0, 0.0), end, lambda: None)
    assert recorded.done == [("kill", "shard-1-0"), ("kill", "shard-0-0")]


def test_chaos_heals_due_faults_and_all_at_the_end(recorded: Any) -> None:
    said: list[str] = []
    chaos = Chaos(recorded, 1, ["isolate"], dict, said.append, beyond=True)
    chaos._inject(Fault("isolate", "shard-0-0", "", 0, 0.0), time.monotonic() + 1, lambda: None)
    chaos._pass(time.monotonic(), lambda: None)
    assert recorded.done == [("isolate", "shard-0-0"), ("heal", "shard-0-0")]
    assert not recorded.healed
    chaos.run(0.0)
    assert recorded.healed
    assert said[-1].endswith("everything is healed")


def test_chaos_heals_everything_after_an_error(recorded: Any) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Chaos(recorded, 1, ["kill"], dict, lambda _: None).run(60.0, fail)
    assert recorded.healed


# --- a real cluster ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    with Cluster(directory, shards=1, failure_handlers=0, launcher=[LAUNCHER]) as running:
        yield running


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[Nodes]:
    found = Nodes(cluster.config.data_dir)
    yield found
    found.heal_all()


def test_processes_are_found_by_their_names(cluster: Cluster, nodes: Nodes) -> None:
    assert nodes.names == tuple(cluster.nodes)
    assert [nodes.find(name) for name in nodes.names] == [cluster.pid(n) for n in nodes.names]
    assert nodes.group_of("shard-0-1") == ("shard-0-0", "shard-0-1")
    with pytest.raises(ConfigError):
        nodes.find("shard-7-7")


def inserts(log: ziplog.Log) -> bool:
    try:
        log.insert_after(b"x", timeout=0.3)
    except (ziplog.OutcomeUnknownError, UnavailableError):
        return False
    return True


def test_a_frozen_or_cut_node_delays_inserts(cluster: Cluster, nodes: Nodes) -> None:
    with cluster.connect() as log:
        wait_until(lambda: inserts(log), "it inserts")
        nodes.pause("shard-0-1")
        assert not inserts(log)
        nodes.resume("shard-0-1")
        wait_until(lambda: inserts(log), "it goes on")
        nodes.cut_from_clients("shard-0-0")
        wait_until(lambda: not inserts(log), "it is cut")
        nodes.heal("shard-0-0")
        wait_until(lambda: inserts(log), "it is healed")


def test_a_replica_cut_from_its_peers_is_healed(cluster: Cluster, nodes: Nodes) -> None:
    def silent() -> dict[str, frozenset[str]]:
        return {name: control.read(nodes.data_dir, name).silent_to for name in nodes.names}

    none = dict.fromkeys(nodes.names, frozenset[str]())
    nodes.cut_from_peers("shard-0-1")
    assert silent() == none | {
        "shard-0-0": frozenset({"shard-0-1"}),
        "shard-0-1": frozenset({"shard-0-0"}),
    }
    nodes.heal("shard-0-1")
    assert silent() == none
    nodes.cut("shard-0-0", ["shard-0-1"], one_way=True)
    assert silent() == none | {"shard-0-0": frozenset({"shard-0-1"})}
    nodes.isolate("mms-0")
    nodes.heal_all()
    assert silent() == none
    with cluster.connect() as log:
        rid = log.insert_after(b"stable soon", timeout=DEADLINE_S)
        wait_until(lambda: log.cluster()["shards"][0]["stable_gsn"] >= rid.gsn, "it is stable")


def test_the_command_refuses_unknown_names(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data_dir = str(cluster.config.data_dir)
    assert command.main(["--data-dir", data_dir, "kill", "shard-9-9"]) == 2
    assert "shard-9-9" in capsys.readouterr().err
    assert command.main(["--data-dir", str(tmp_path), "heal"]) == 2
    with pytest.raises(SystemExit, match="2"):
        command.main(["--data-dir", data_dir, "random", "--kinds", "flood"])


def test_the_command_freezes_and_heals(cluster: Cluster, nodes: Nodes) -> None:
    data_dir = str(cluster.config.data_dir)
    pid = nodes.pid("mms-0")
    assert command.main(["--data-dir", data_dir, "pause", "mms-0"]) == 0
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    assert command.main(["--data-dir", data_dir, "heal"]) == 0
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"


def test_flushed_bytes_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", os.fsync)
    monkeypatch.setattr(os, "fdatasync", os.fdatasync)
    source = FaultSource(tmp_path, "a")
    layer._slow_disk(source)
    control.write(tmp_path, "a", ActiveFaults(notes_syncs=True))
    wait_until(lambda: source.current().notes_syncs, "it knows")
    path = tmp_path / "1.seg"
    assert control.synced(tmp_path, "a", path) == 0
    with path.open("wb", buffering=0) as file:
        file.write(b"12345")
        os.fdatasync(file.fileno())
        file.write(b"678")
        assert control.synced(tmp_path, "a", path) == 5
        os.fdatasync(file.fileno())
    assert control.synced(tmp_path, "a", path) == 8
    assert control.synced(tmp_path, "a", tmp_path / "2.seg") == 0


def test_a_power_cut_keeps_flushed_bytes(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(cluster.config.data_dir / CLUSTER_FILE, tmp_path)
    nodes = Nodes(tmp_path)
    done: list[Any] = []
    for kind in ("pause", "kill_all"):
        monkeypatch.setattr(nodes, kind, lambda names, kind=kind: done.append((kind, names)))
    names = ["shard-0-0", "shard-0-1"]
    paths = [tmp_path / name / "segments" / "1.seg" for name in names]
    for path in paths:
        path.parent.mkdir(parents=True)
    (tmp_path / "faults").mkdir()
    control.note_sync(tmp_path, "shard-0-0", str(paths[0]), 100)
    control.note_sync(tmp_path, "shard-0-1", str(paths[1]), 97)
    left = set()
    for seed in range(100):
        for path in paths:
            path.write_bytes(bytes(100))
        nodes.power_cut(names, seed)
        left.add(tuple(path.stat().st_size for path in paths))
    assert left == {(100, 97), (100, 98), (100, 99), (100, 100)}
    assert done[:3] == [("pause", "shard-0-0"), ("pause", "shard-0-1"), ("kill_all", names)]


def test_damage_is_done_to_the_files_of_a_dead_server(tmp_path: Path) -> None:
    with Cluster(tmp_path, shards=1, f=0, failure_handlers=0) as cluster:
        nodes = Nodes(cluster.config.data_dir)
        with pytest.raises(UnavailableError, match="without a layer of faults"):
            nodes.cut_from_clients("shard-0-0")
        with cluster.connect() as log:
            log.insert_many([b"%d" % number for number in range(100)])
            wait_until(lambda: log.cluster()["shards"][0]["durable_gsn"] > 0, "it is on disk")
        said = nodes.torn_tail("shard-0-0", 1)
        assert nodes.find("shard-0-0") is None
        wait_until(lambda: cluster.dead() == ["shard-0-0"], "its parent knows it, too")
        (path,) = (cluster.config.data_dir / "shard-0-0" / "segments").glob("*.seg")
        before = path.read_bytes()
        assert f"from {len(before)} on are gone" in said
        said = nodes.bitflip("shard-0-0", 1)
        after = path.read_bytes()
        (offset,) = [
            i for i, pair in enumerate(zip(before, after, strict=True)) if len({*pair}) == 2
        ]
        cluster.restart("shard-0-0")
        wait_until(lambda: nodes.find("shard-0-0") is not None, "it runs again")
        nodes.kill_all(nodes.names)
        wait_until(lambda: sorted(cluster.dead()) == sorted(nodes.names), "all are dead")
        assert (before[offset] ^ after[offset]).bit_count() == 1
        assert f"of byte {offset} is flipped" in said
