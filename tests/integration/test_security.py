"""Strangers at every port of real processes: their traffic must not affect other clients.

A stranger that speaks the protocol correctly can do harm: messages are not authenticated, so
processes listen on loopback by default.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import select
import socket
import struct
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, get_args

import msgspec
import pytest

import ziplog
from tests.damaged_frames import damaged, recorded
from tests.raw_peer import RawPeer, framed
from tests.waiting import wait_until
from ziplog import wire
from ziplog.core.entries import Body, encode_body
from ziplog.core.fields import MAX_FRAME
from ziplog.core.message import Message
from ziplog.local import Cluster
from ziplog.runtime.connection import GREETING, pack_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ziplog.config import NodeConfig

pytestmark = pytest.mark.timeout(300)

DEADLINE_S: Final = 30.0
LARGEST: Final = 2**63 - 1
WRONG_SHARD: Final = b"stranger" * 2
_Kind = TypeVar("_Kind", bound=Message)
#: What witnesses insert.
PAYLOADS: Final = {b"start", b"witness", b"end"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("strangers")
    # A recovery would make another view.
    settings = {"suspicion_ms": 20_000}
    with Cluster(directory, shards=2, mms=3, settings=settings, timeout=100.0) as running:
        pids = {name: running.pid(name) for name in running.nodes}
        yield running
        assert running.dead() == []
        assert {name: running.pid(name) for name in running.nodes} == pids


@pytest.fixture(scope="module")
def number(cluster: Cluster) -> int:
    """The cluster's number, which every client learns."""
    with Stranger(cluster.config.mms[0]) as stranger:
        info = stranger.ask(wire.Hello(0, 1), wire.ClusterInfo)
        return info.cluster


class Witness:
    """A client that inserts, and one that follows, during an attack."""

    def __init__(self, cluster: Cluster) -> None:
        self._log = cluster.connect(timeout=60.0)
        self._reader = cluster.connect(timeout=60.0)
        self._start = self._log.insert_after(b"start")
        self._inserted = [self._start]
        self._delivered: list[ziplog.RecordId] = []
        self._over = threading.Event()
        self._failures: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._run, args=(what,))
            for what in (self._insert, self._follow)
        ]

    def _run(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self._failures.append(error)

    def _insert(self) -> None:
        while not self._over.is_set():
            self._inserted.append(self._log.insert_after(b"witness", self._inserted[-1]))
            self._over.wait(0.002)
        self._inserted.append(self._log.insert_after(b"end", self._inserted[-1]))

    def _follow(self) -> None:
        with self._reader.subscribe(self._start, timeout=DEADLINE_S) as records:
            for record in records:
                if record.payload in PAYLOADS:
                    self._delivered.append(record.rid)
                if record.payload == b"end":
                    return

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        count = len(self._inserted)
        try:
            # Inserts and deliveries continue after it too.
            wait_until(lambda: bool(self._failures) or len(self._inserted) > count + 10, "inserts")
            self._over.set()
            for thread in self._threads:
                thread.join()
            assert self._failures == []
            assert self._delivered == self._inserted
            for rid in self._inserted[:: max(1, len(self._inserted) // 20)]:
                assert self._log.read_record(rid).payload in PAYLOADS
        finally:
            self._over.set()
            self._log.close()
            self._reader.close()


class Stranger(RawPeer):
    """A peer that sends frames to a node, and possibly messages."""

    def __init__(self, node: NodeConfig) -> None:
        super().__init__(node.port)
        # A node that is busy with other tests may take longer to read.
        self.socket.settimeout(DEADLINE_S)

    def __enter__(self) -> Self:
        return self

    def send_message(self, message: Message | bytes) -> None:
        self.send_frame(message if isinstance(message, bytes) else wire.encode(message))

    def ask(self, message: Message, kind: type[_Kind]) -> _Kind:
        """Send a message, and again until an answer of this kind comes."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            self.send_message(message)
            if select.select([self.socket], [], [], 0.5)[0]:
                answer = wire.decode(self.receive_frame())
                if isinstance(answer, kind):
                    return answer
        raise AssertionError(f"no {kind.__name__} within {DEADLINE_S} s")


def probe_consensus(cluster: Cluster) -> None:
    """Commit a command: the service reports an unassigned position only after a commit."""
    with cluster.connect(timeout=DEADLINE_S) as log, pytest.raises(ziplog.NoSuchRecordError):
        log.insert_after(b"stranger", ziplog.RecordId(LARGEST // 2, 0))


def servers(cluster: Cluster) -> list[NodeConfig]:
    return [node for shard in cluster.config.shards for node in shard.replicas]


def greet(stranger: Stranger, node: NodeConfig, cluster: Cluster, number: int) -> None:
    """Send a request that every service node always answers."""
    if node in cluster.config.failure_handlers:
        stranger.ask(wire.OrdersQuery(number, 1), wire.Orders)
    else:
        stranger.ask(wire.Hello(number, 1), wire.ClusterInfo)


def log_of(cluster: Cluster, node: NodeConfig) -> str:
    return (cluster.config.data_dir / "logs" / f"{node.name}.log").read_text()


def send_until_logged(
    cluster: Cluster, node: NodeConfig, send: Callable[[], object], words: str
) -> None:
    """Send until another line with these words is logged: there is at most one a second."""
    before = log_of(cluster, node).count(words)

    def is_logged() -> bool:
        send()
        return log_of(cluster, node).count(words) > before

    wait_until(is_logged, f"a line of {node.name} that says {words}")


# --- bytes -----------------------------------------------------------------------------------


NOISE: Final = random.Random(7).randbytes(100_000)
BYTES: Final = [
    b"\n",
    NOISE,
    b"\xff" * 1000,
    b"\0" * 1000,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + NOISE[:500],
    b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48),
    GREETING[:-1],
    GREETING[:-1] + b"\1",
    GREETING,
    GREETING + NOISE,
    GREETING + pack_length(2**32 - 1) + NOISE,
    GREETING + pack_length(MAX_FRAME + 1) + NOISE,
    GREETING + pack_length(MAX_FRAME) + NOISE,
    GREETING + pack_length(0) * 20_000,
    GREETING + framed(NOISE) * 50,
]


def library_frame(message: object) -> bytes:
    """A frame as the consensus library frames them; bytes are a message as it is encoded."""
    encoded = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    data = zlib.compress(encoded)
    return struct.pack("i", len(data)) + data


def pour(port: int, data: bytes) -> None:
    """Send bytes, whether they are wanted or not."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=5) as connection,
    ):
        connection.sendall(data)
        # Until the other side has had enough, or says nothing more. (It may throw away unseen what
        # came right before the end, so this side does not hang up first.)
        connection.settimeout(0.05)
        while connection.recv(4096):
            pass


def test_random_bytes_at_every_port(cluster: Cluster) -> None:
    ports = [node.port for node in cluster.config.nodes]
    ports += [node.raft_port for node in cluster.config.mms if node.raft_port is not None]
    with Witness(cluster):
        for port, data in itertools.product(ports, BYTES):
            pour(port, data)


def test_a_disconnect_during_a_flood_affects_no_other_client(cluster: Cluster) -> None:
    flood = framed(b"x") * 2000 + framed(NOISE)[:-1]
    with Witness(cluster):
        for node in cluster.config.nodes * 5:
            with RawPeer(node.port) as stranger:
                stranger.send(flood)
                # The process that answers a later greeting has read a part of the flood.
                with RawPeer(node.port) as later:
                    assert later.is_greeted()
                stranger.reset()


@pytest.mark.parametrize("claim", [False, True])
def test_the_consensus_port_rejects_code_and_garbage(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, *, claim: bool
) -> None:
    mark = tmp_path_factory.mktemp("exploit") / "mark"
    nodes = cluster.config.mms
    hostile = [
        # A pickle that makes a file.
        library_frame(b"cbuiltins\nopen\n(S'%s'\nS'w'\ntR." % str(mark).encode()),
        library_frame(["status"]),
        library_frame(["transfer"]),
        library_frame(["set_version", 99]),
        library_frame("readonly"),
        library_frame({"type": "append_entries"}),
        library_frame({1: 2}),
        library_frame(None),
        library_frame([]),
        struct.pack("i", -5) + b"x" * 100,
        struct.pack("i", 2**31 - 1) + NOISE,
        struct.pack("i", 2**20) + NOISE * 12,
        struct.pack("i", 20) + NOISE[:20],
        struct.pack("i", 0) + NOISE[:20],
    ]
    if claim:
        # A peer may claim to be a node, but an invalid message changes nothing.
        hostile = [
            library_frame(f"127.0.0.1:{nodes[1].raft_port}") + frame
            for frame in [
                hostile[0],
                library_frame({"type": "append_entries", "term": "x"}),
                library_frame({"type": "request_vote"}),
                library_frame({"no": "type"}),
                library_frame(["list"]),
                library_frame(7),
                *hostile[-5:],
            ]
        ]
    with Witness(cluster):
        for node, data in itertools.product(nodes[:1] if claim else nodes, hostile):
            assert node.raft_port is not None
            pour(node.raft_port, data)
        port = nodes[0].raft_port or 0
        send_until_logged(
            cluster, nodes[0], lambda: pour(port, hostile[-1]), "consensus port: dropped"
        )
        probe_consensus(cluster)
    assert not mark.exists()


def test_a_flood_of_the_consensus_ports_is_disconnected(cluster: Cluster) -> None:
    over = threading.Event()
    ports = [node.raft_port for node in cluster.config.mms]
    cuts = dict.fromkeys(ports, 0)

    def flood(port: int) -> None:
        while not over.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=5) as connection,
            ):
                # Announce one frame that could be, and send without end.
                connection.sendall(struct.pack("i", 4000))
                while not over.is_set():
                    connection.sendall(NOISE)
            cuts[port] += 1

    threads = [threading.Thread(target=flood, args=(port,)) for port in ports]
    with Witness(cluster):
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                before = dict(cuts)
                wait_until(lambda: all(cuts[p] > before[p] + 3 for p in ports), f"cuts, {cuts}")  # noqa: B023
                probe_consensus(cluster)
        finally:
            over.set()
            for thread in threads:
                thread.join()


# --- frames ----------------------------------------------------------------------------------


def test_frames_that_are_not_messages(cluster: Cluster, number: int) -> None:
    good = wire.encode(wire.Read(number, 0, 1, 1, 1))
    fields = msgspec.msgpack.decode(good)
    frames = [
        b"",
        b"\0",
        b"\xc1",
        NOISE,
        good[:-1],
        good + b"\0",
        b"\xdd\xff\xff\xff\xff",  # a list of 2**32 - 1
        b"\x91" * 5000,  # lists in lists
        msgspec.msgpack.encode([fields[0] + 256, *fields[1:]]),  # another version
        msgspec.msgpack.encode([255, *fields[1:]]),
        msgspec.msgpack.encode([fields[0], -1, *fields[2:]]),
        msgspec.msgpack.encode([fields[0], *fields[1:-1], 2**63]),
        msgspec.msgpack.encode([*fields[:-1], "1"]),
        msgspec.msgpack.encode(fields[:2]),
        msgspec.msgpack.encode({"type": fields[0]}),
        bytes(MAX_FRAME),
    ]
    with Witness(cluster):
        for node in cluster.config.nodes:
            with Stranger(node) as stranger:
                for frame in frames:
                    stranger.send_message(frame)
                # Still answered over the same connection.
                if node in servers(cluster):
                    shard = cluster.config.shard_of(node.name)[0].id
                    stranger.ask(wire.Read(number, shard, 1, 1, 1), wire.ReadReply)
                else:
                    greet(stranger, node, cluster, number)
            with Stranger(node) as stranger:
                # Longer than any frame may be: that connection is cut.
                with contextlib.suppress(ConnectionError):
                    stranger.send_frame(bytes(MAX_FRAME + 4096))
                wait_until(stranger.is_closed, f"{node.name} ends the connection")
            if node.name in {"mms-0", "shard-0-0"}:
                with Stranger(node) as stranger:
                    send_until_logged(
                        cluster,
                        node,
                        lambda: stranger.send_frame(b""),
                        "frame dropped",
                    )


def test_messages_of_another_cluster_shard_or_view_are_refused(
    cluster: Cluster, number: int
) -> None:
    body = encode_body(Body(0, None, [b"stranger"]))

    def insert(cluster: int, shard: int, view: int) -> wire.Insert:
        return wire.Insert(cluster, shard, view, WRONG_SHARD, 1, 1, 0, 0, 1, body)

    with Witness(cluster):
        for node in servers(cluster):
            shard = cluster.config.shard_of(node.name)[0].id
            with Stranger(node) as stranger:
                for message, code in (
                    (insert(number ^ 1, shard, 1), "wrong-cluster"),
                    (insert(number, shard + 1, 1), "wrong-shard"),
                    (insert(number, shard, 2), "wrong-view"),
                    (insert(number, shard, 2**32 - 1), "wrong-view"),
                ):
                    assert stranger.ask(message, wire.Refused).code == code
        with Stranger(cluster.config.mms[0]) as stranger:
            assert stranger.ask(wire.Hello(number ^ 1, 1), wire.Refused).code == "wrong-cluster"
    with cluster.connect() as log:
        first = ziplog.RecordId.parse(log.cluster()["trimmed_before"])
        assert all(record.payload != b"stranger" for record in log.subscribe(first, follow=False))


def test_inserts_that_a_correct_client_never_sends(cluster: Cluster, number: int) -> None:
    body = encode_body(Body(0, None, [b"stranger"]))
    good = wire.Insert(number, 0, 1, WRONG_SHARD, 1, 1, 0, 0, 1, body)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"seq": LARGEST}, "full"),
        ({"body": b""}, "malformed"),
        ({"body": NOISE}, "malformed"),
        ({"count": 2}, "malformed"),
        ({"seq": 5, "predecessor": 5}, "malformed"),
        ({"seq": 5, "predecessor": LARGEST}, "malformed"),
        ({"body": encode_body(Body(0, None, [bytes(2**20 + 1)]))}, "too-large"),
        ({"body": encode_body(Body(0, bytes(4097), [b""]))}, "too-large"),
        (
            {"count": 12, "body": encode_body(Body(0, None, [bytes(2**20)] * 12))},
            "too-large",
        ),
        ({"after": LARGEST}, "no-such-position"),
        ({"seq": 0}, "identity-reused"),
        ({"seq": 3, "first_incomplete": LARGEST}, "identity-reused"),
    ]
    with Witness(cluster), Stranger(cluster.config.shards[0].replicas[0]) as stranger:
        for changes, code in cases:
            message = msgspec.structs.replace(good, **changes)
            refused = stranger.ask(message, wire.Refused)
            assert refused.code == code, changes


# --- messages of every kind, with every extreme value ----------------------------------------


#: Accepted with the right view: their sender counts as a server or the failure handler.
TRUSTED: Final = (
    wire.Forward, wire.Report, wire.Beat, wire.Suspect, wire.Frozen, wire.Remove, wire.Reinsert,
)  # fmt: skip


#: Every client that reaches a port may do this.
OPERATORS: Final = (wire.Trim, wire.ChangeShard, wire.ChangeRegion)


def extremes(kind: type[Message], cluster: int, shard: int, view: int) -> list[bytes]:
    """Return frames of a message with extreme values in its other fields, valid or not."""
    known = {"cluster": cluster, "shard": shard, "view": view}
    names = kind.__struct_fields__
    tag = kind.__struct_config__.tag
    values: list[Any] = [0, 1, LARGEST, WRONG_SHARD, "", [], [1], True, "up", b"", NO_PLACE]
    found = []
    for name, value in itertools.product([n for n in names if n not in known], values):
        fields = [tag, *(known.get(n, _default(n)) for n in names)]
        fields[1 + names.index(name)] = value
        found.append(msgspec.msgpack.encode(fields))
    found.append(msgspec.msgpack.encode([tag, *(known.get(n, _default(n)) for n in names)]))
    return found


NO_PLACE: Final = [[1, WRONG_SHARD, 1, 1, 1, [1], 0, None]]


def _default(name: str) -> Any:
    if name == "client":
        return WRONG_SHARD
    if name == "digest":
        return bytes(8)
    if name in {"body", "payload", "document"}:
        return encode_body(Body(0, None, [b""]))
    if name == "gsns":
        return [1]
    if name in {"decisions", "units", "leases", "runs", "placements", "mms"}:
        return []
    if name in {"node", "endpoint", "name", "leader", "detail", "identity"}:
        return "shard-0-0"
    return {"state": "limbo", "code": "full", "answer": "record", "durability": "memory"}.get(
        name, 1
    )


def test_every_kind_of_message_with_every_extreme_value(cluster: Cluster, number: int) -> None:
    kinds = get_args(wire.AnyMessage)
    with Witness(cluster):
        for node in cluster.config.nodes:
            is_server = node in servers(cluster)
            shard = cluster.config.shard_of(node.name)[0].id if is_server else 0
            with Stranger(node) as stranger:
                for kind in kinds:
                    for view in (1, 7):
                        if kind not in TRUSTED:
                            for frame in extremes(kind, number, shard, view):
                                stranger.send_message(frame)
                    for frame in extremes(kind, number ^ 1, shard, 1):
                        stranger.send_message(frame)
                # After all of it, on the same connection.
                if is_server:
                    stranger.ask(wire.Read(number, shard, 1, 1, 1), wire.ReadReply)
                else:
                    greet(stranger, node, cluster, number)


def is_trusted(frame: bytes) -> bool:
    """Whether a frame is a message that would do what it says, because senders are not verified."""
    try:
        return isinstance(wire.decode(frame), (*TRUSTED, *OPERATORS))
    except ziplog.ProtocolError:
        return False


def test_damaged_frames_of_real_processes_at_every_port(cluster: Cluster, number: int) -> None:
    frames = recorded(number)
    kinds = {type(wire.decode(frame)) for frame in frames}
    assert {wire.Insert, wire.Subscribe, wire.Forward, wire.Heartbeat, wire.LeaseAnnounced} <= kinds
    chance = random.Random(11)
    with Witness(cluster):
        for node in cluster.config.nodes:
            for _ in range(10):
                sent = [frame for frame in damaged(frames, chance) if not is_trusted(frame)]
                data = b"".join(map(framed, sent))
                pour(node.port, GREETING + data)
                # The flip may hit a length, and the cut a frame.
                flipped = bytearray(data[: chance.randint(1, len(data))])
                flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
                pour(node.port, GREETING + flipped)
            with Stranger(node) as stranger:
                if node in servers(cluster):
                    shard = cluster.config.shard_of(node.name)[0].id
                    stranger.ask(wire.Read(number, shard, 1, 1, 1), wire.ReadReply)
                else:
                    greet(stranger, node, cluster, number)


def test_leases_and_halt_orders_of_a_stranger_are_ignored(cluster: Cluster, number: int) -> None:
    for node in cluster.config.shards[0].replicas:
        with Witness(cluster), Stranger(node) as stranger:
            for of in (number, number ^ 1):
                stranger.send_message(wire.LeaseHistory(of, 1, [], [], LARGEST))
                send_until_logged(
                    cluster,
                    node,
                    lambda: stranger.send_message(wire.LeaseAnnounced(of, [], 0, [], LARGEST)),  # noqa: B023
                    "LeaseAnnounced",
                )


# --- too much --------------------------------------------------------------------------------


def test_a_client_that_connects_200_times(cluster: Cluster) -> None:
    with Witness(cluster), contextlib.ExitStack() as stack:
        ports = [node.port for node in cluster.config.nodes]
        ports += [node.raft_port or 0 for node in cluster.config.mms]
        for port in ports:
            for _ in range(200):
                connection = socket.create_connection(("127.0.0.1", port), timeout=30)
                stack.enter_context(connection)
        probe_consensus(cluster)


def test_a_subscriber_that_never_reads_and_one_that_floods_credit(
    cluster: Cluster, number: int
) -> None:
    with cluster.connect() as log, Witness(cluster):
        log.set_policy(ziplog.policy.pin(0))
        start = log.insert_after(b"first")
        log.insert_many([bytes(100_000)] * 100)
        node = cluster.config.shards[0].replicas[0]
        with Stranger(node) as silent, Stranger(node) as greedy:
            for subscription in range(1, 20):
                silent.send_message(
                    wire.Subscribe(number, 0, 1, WRONG_SHARD, subscription, start.gsn, LARGEST)
                )
            for credit in range(3000):
                greedy.send_message(
                    wire.Credit(number, 0, 1, WRONG_SHARD, credit % 40, LARGEST - credit)
                )
            # On a busy machine the shard may look late, and be parked for a while.
            log.insert_many([bytes(100_000)] * 100, timeout=60)
            with cluster.connect() as reader:
                found = [r.payload for r in reader.subscribe(start, follow=False)]
    assert found.count(bytes(100_000)) == 200
