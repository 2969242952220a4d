"""Bit flips in every file of a stopped cluster are detected or harmless.

A real cluster writes the files; this process loads them with the code of a start. Some bytes of
each file (all of them with a large ZIPLOG_FLIPS) have a bit flipped. Allowed results: an error that
names the file, the state without the flip, or a reduced state that shows what is missing (a server
without its checkpoint is in limbo). For segments see tests/unit/shard/test_segment_damage.py.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from dataclasses import asdict
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from failure_handler.state import HandlerState
from mms.membership_rules import contradiction, moved_nodes
from mms.state import ClusterState
from shard.storage.data_directory import DataDirectory
from shard.storage.segment_store import SegmentStore
from tests.logged_events import captured_events
from tests.unit.shard.archive.logs import make, walk
from tests.waiting import wait_until
from ziplog.config import load, parse
from ziplog.core.node import Restored
from ziplog.deploy.supervisor import _refuse_other_directories, running_pid
from ziplog.errors import ConfigError, ZiplogError
from ziplog.local import Cluster
from ziplog.raft.raft import Raft
from ziplog.raft.snapshot import Snapshot
from ziplog.segments.block_reader import BlockReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ziplog.config import ClusterConfig

pytestmark = pytest.mark.timeout(300)

MIB = 1024 * 1024
#: Number of bytes of each file with a flipped bit: both ends, and random ones.
BYTES = int(os.environ.get("ZIPLOG_FLIPS", "30"))
#: Every file that a cluster keeps, and what reads it at a start; "": nothing does.
FILES = {
    r"cluster\.toml": "cluster file",
    r"supervisor\.pid": "supervisor",
    r"logs/.*\.log": "",
    r"(mms|failure-handler|fh)-\d/(journal|flushed|snapshot)": "consensus",
    r"shard-0-\d/(lock|identity\.json|started|checkpoint)": "server",
    r"shard-0-\d/segments/(flushed|.*\.(idx|rows))": "server",
    r"shard-0-\d/segments/.*\.seg": "",  # tests/unit/shard/test_segment_damage.py
}


class Stopped(NamedTuple):
    """A cleanly stopped cluster, and its content."""

    directory: Path
    contents: dict[Path, bytes]

    def put_back(self) -> None:
        for path in self.directory.rglob("*"):
            if path.is_file() and path not in self.contents:
                path.unlink()
        for path, content in self.contents.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)

    def files(self, reader: str) -> list[Path]:
        return sorted(path for path in self.contents if _reader(self.directory, path) == reader)


def _reader(directory: Path, path: Path) -> str | None:
    name = str(path.relative_to(directory))
    return next((FILES[known] for known in FILES if re.fullmatch(known, name)), None)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    directory = tmp_path_factory.mktemp("flips") / "data"
    settings = {"segment_bytes": MIB, "disk_reserve_bytes": 0}
    with Cluster(directory, shards=1, settings=settings) as cluster, cluster.connect() as log:
        for number in range(12):
            log.insert_many([b"%d" % number + b"x" * 1000] * 100)
    for server in ("shard-0-0", "shard-0-1"):  # A stop leaves an unfinished file behind.
        make(directory / server / "segments")
    config = load(directory / "cluster.toml")
    for name, machine in ((config.mms[0].name, ClusterState), (_handler(config), HandlerState)):
        raft = _raft(directory, name, machine())
        raft.start()
        wait_until(lambda raft=raft: raft.status().is_leader, "no leader")  # type: ignore[misc]
        raft.snapshot()
        wait_until((directory / name / "snapshot").exists, "no snapshot")
        raft.stop()
    contents = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    return Stopped(directory, contents)


@pytest.fixture(autouse=True)
def without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ziplog.raft.journal", "ziplog.raft.snapshot", "shard.storage.data_directory"):
        monkeypatch.setattr(f"{module}.os.fsync", lambda _fd: None)


def _handler(config: Any) -> str:
    return config.failure_handlers[0].name  # type: ignore[no-any-return]


def _raft(directory: Path, name: str, machine: Any, on_event: Any = lambda _: None) -> Raft:
    node = load(directory / "cluster.toml").node(name)
    return Raft(
        name, {name: f"{node.host}:{node.raft_port}"}, directory / name, machine,
        on_event=on_event, on_fatal=print,
    )  # fmt: skip


# --- loading at a start ---


def consensus(stopped: Stopped, path: Path) -> object:
    name = path.parent.name
    machine = ClusterState() if name.startswith("mms") else HandlerState()
    events: list[Any] = []
    raft = _raft(stopped.directory, name, machine, events.append)
    try:
        journal = raft._journal
        restored = [event.snapshot for event in events if isinstance(event, Restored)]
        return (
            journal.entries, journal.term, journal.voted_for, journal.commit_index,
            journal.identity, journal.is_voter, journal.founders, machine.snapshot(), restored,
        )  # fmt: skip
    finally:
        raft.stop()


class Server(NamedTuple):
    identity: object
    was_used: bool
    checkpoint: bytes | None
    log: object
    #: None: there are no rows, and readers take the log instead.
    rows: object


def server(stopped: Stopped, path: Path) -> Server:
    home = stopped.directory / path.relative_to(stopped.directory).parts[0]
    archive = BlockReader(home / "segments")
    rows, _, _ = walk(archive, 1, 2**60)
    directory = DataDirectory(home, load(stopped.directory / "cluster.toml").name, home.name)
    try:
        store = SegmentStore.open(directory.segments, flush_interval_ms=0, reserve_bytes=0)
        entries = store.read_after(0, 2**40)
        log = (entries, store.first_fseq, store.last_fseq, store.mark, store.damage, store.last_end)
        assert store.close()
        return Server(
            directory.identity,
            directory.was_used,
            directory.read_checkpoint(),
            log,
            rows or None,
        )
    finally:
        directory.close()


# --- flips ---


def flips(content: bytes, seed: str) -> Iterator[tuple[int, int]]:
    """Give bytes and the bit in each that flips."""
    random = Random(seed)
    ends = {*range(len(content))[:48], *range(len(content))[-48:]}
    some = random.sample(range(len(content)), min(BYTES, len(content)))
    for at in sorted(ends.union(some)):
        yield at, random.randrange(8)


def search(
    stopped: Stopped,
    reader: str,
    load: Callable[[Stopped, Path], Any],
    judge: Callable[[Any, Any], str],
) -> dict[str, dict[str, int]]:
    """Flip bits of all files of a reader; return how often there was which outcome, by name."""
    counts: dict[str, dict[str, int]] = {}
    for path in stopped.files(reader):
        before = load(stopped, path)
        stopped.put_back()
        content = stopped.contents[path]
        found = counts.setdefault(path.suffix or path.name, {})
        for at, bit in flips(content, path.name):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            path.write_bytes(changed)
            try:
                with captured_events():
                    after = load(stopped, path)
            except ZiplogError as error:
                outcome = "refused" if str(path.parent) in str(error) else ""
                after = error
            else:
                outcome = "harmless" if after == before else judge(before, after)
            assert outcome, f"believed: {path}, byte {at}, bit {bit}: {after}"
            found[outcome] = found.get(outcome, 0) + 1
            stopped.put_back()
    logging.getLogger(__name__).info("%s: %s", reader, counts)
    return counts


def test_every_file_of_a_data_directory_is_known(stopped: Stopped) -> None:
    """A new kind of file needs a reader here, and flips."""
    unknown = [path for path in stopped.contents if _reader(stopped.directory, path) is None]
    assert unknown == []
    kinds = {path.suffix or path.name for path in stopped.contents}
    assert kinds == {
        ".toml", ".pid", ".log", "journal", "flushed", "snapshot", "lock", ".json", "started",
        "checkpoint", ".idx", ".rows", ".seg",
    }  # fmt: skip


def test_a_flip_in_a_consensus_directory_is_refused_or_healed(stopped: Stopped) -> None:
    counts = search(stopped, "consensus", consensus, lambda _before, _after: "")
    assert set(counts["journal"]) == {"refused"}
    assert set(counts["snapshot"]) == {"refused"}
    assert set(counts["flushed"]) == {"harmless"}


def test_a_flip_in_a_servers_directory_is_refused_or_healed(stopped: Stopped) -> None:
    def judge(before: Server, after: Server) -> str:
        if after._replace(checkpoint=None, rows=None) != before._replace(
            checkpoint=None, rows=None
        ):
            return ""
        is_less = after.checkpoint in (None, before.checkpoint) and (
            after.rows is None or set(after.rows) <= set(before.rows)  # type: ignore[call-overload]
        )
        return "healed" if is_less else ""

    counts = search(stopped, "server", server, judge)
    assert set(counts[".json"]) == {"refused"}
    assert set(counts["checkpoint"]) == {"healed"}
    assert set(counts[".idx"]) == set(counts["flushed"]) == {"harmless"}
    assert set(counts[".rows"]) == {"healed", "harmless"}


#: Keys of a cluster file that a flip may change undetected: settings and addresses, which do not
#: affect stored data.
UNSEEN = {
    "epoch_ms", "flush_interval_ms", "max_payload_bytes", "max_key_bytes", "max_unsettled_units",
    "suspicion_ms", "rtt_ms", "min_regions", "session_timeout_s", "segment_bytes", "cache_bytes",
    "disk_reserve_bytes",
    "log.level", "log.format", "log.file_bytes", "log.files",
    "mms.host", "mms.port", "mms.raft_port", "fh.host", "fh.port", "fh.raft_port",
}  # fmt: skip


def test_a_flip_in_a_cluster_file_changes_no_identity(stopped: Stopped) -> None:
    path = stopped.directory / "cluster.toml"
    content, before = stopped.contents[path], load(path)
    state = ClusterState()
    state.restore(Snapshot.read(stopped.directory / "mms-0" / "snapshot").state)
    outcomes: dict[str, int] = {}
    for at, bit in itertools.product(range(len(content)), range(8)):
        flipped = bytearray(content)
        flipped[at] ^= 1 << bit
        try:
            found = parse(flipped.decode(), path)
            _refuse_other_directories(found, stopped.directory, path)
        except (ConfigError, UnicodeDecodeError):
            outcome = "refused"
        else:
            changed = _flat(found).items() ^ _flat(before).items()
            is_seen = contradiction(state, found) or moved_nodes(state, found)
            outcome = "refused" if is_seen else "unseen" if changed else "harmless"
            assert is_seen or {name for name, _ in changed} <= UNSEEN, changed
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    logging.getLogger(__name__).info("cluster file: %s", outcomes)
    assert outcomes["unseen"] < outcomes["refused"] / 10


def _flat(config: ClusterConfig) -> dict[str, object]:
    """Return everything that a cluster file says, by key."""
    keys = {name: value for name, value in asdict(config).items() if name not in _PARTS}
    keys |= {f"log.{name}": value for name, value in keys.pop("log").items()}
    for kind, nodes in (("mms", config.mms), ("fh", config.failure_handlers)):
        for node in nodes:
            keys |= {f"{kind}.{name}": value for name, value in asdict(node).items()}
    return keys | {f"shard {shard.id}": shard.replicas for shard in config.shards}


_PARTS = {"mms", "failure_handlers", "shards"}


def test_a_flip_in_the_supervisors_file_matters_only_while_it_runs(stopped: Stopped) -> None:
    (stopped.directory / "supervisor.pid").write_bytes(b"12345\n")
    assert running_pid(stopped.directory) is None
    stopped.put_back()


def test_the_identity_of_an_earlier_release_is_read_and_gets_a_checksum(
    stopped: Stopped,
) -> None:
    path = stopped.directory / "shard-0-0" / "identity.json"
    whole = path.read_bytes()
    path.write_bytes(re.sub(rb',"checksum":"[0-9a-f]{8}"', b"", whole))
    assert path.read_bytes() != whole
    server(stopped, path)
    assert path.read_bytes() == whole
    assert path.stat().st_mode & 0o777 == 0o600
    stopped.put_back()
