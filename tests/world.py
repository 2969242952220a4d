"""A small world for pure nodes: virtual time, and links that delay, lose, repeat and reorder.

Every message passes through the codec. A node's message to a name arrives with a route back, as it
does on sockets. What a node persists is in its store at once and flushed `flush_ns` later. After
every step the node checks its invariants.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from shard.replica import Replica, ReplicaConfig
from tests.memory_store import MemoryStore
from ziplog import wire
from ziplog.core.entries import Body, Expire, Place, Skip, encode_body
from ziplog.core.node import (
    BatchEnd,
    Broadcast,
    Complete,
    Connect,
    Disconnect,
    Effect,
    Event,
    FlushBeforeSend,
    Halt,
    LevelRecorded,
    Node,
    Persist,
    Persisted,
    Propose,
    Received,
    RecordLevel,
    Send,
    Stop,
    Wakeup,
)
from ziplog.core.view import NO_DIGEST, Lease, Member, Placement, run_of
from ziplog.core.view import Replica as Address
from ziplog.wire.stable_messages import needs_disk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ziplog.core.message import Message

US = 1_000
MS = 1_000_000
S = 1_000_000_000
CLUSTER = 77
#: Most steps of the world at one moment.
MAX_STEPS = 1000


@dataclass
class Link:
    """How messages travel from one node to another; the world's default unless set."""

    delay: Callable[[], int] = lambda: 50 * US
    lose: Callable[[], bool] = lambda: False
    repeat: Callable[[], bool] = lambda: False


@dataclass
class Probe:
    """A node that only records the messages sent to it."""

    received: list[tuple[int, bytes, Any]] = field(default_factory=list)

    def step(self, event: Event, now: int) -> list[Effect]:
        if isinstance(event, Received):
            self.received.append((now, event.src, event.message))
        return []

    def next_wakeup(self) -> int | None:
        return None

    def check(self) -> None:
        pass

    def of(self, kind: type) -> list[Any]:
        """Return the messages of one kind, in order of arrival."""
        return [message for _, _, message in self.received if isinstance(message, kind)]


class World:
    """Nodes by name, and the messages in flight."""

    def __init__(self, link: Link | None = None) -> None:
        self.now = 1 * S
        self.nodes: dict[str, Node] = {}
        self.stores: dict[str, MemoryStore] = {}
        #: Paused nodes, and nodes that are down: messages to the latter are lost.
        self.paused: set[str] = set()
        self.down: set[str] = set()
        self.link = link or Link()
        self.links: dict[tuple[str, str], Link] = {}
        self.halts: list[tuple[str, str]] = []
        #: Nodes whose processes may end.
        self.stopped: set[str] = set()
        self.completed: dict[tuple[str, int], Any] = {}
        self.proposed: list[tuple[str, Propose]] = []
        #: The name under which a node knows another: (node, other) to that name.
        self._names: dict[tuple[str, bytes], str] = {}
        self._called: dict[tuple[str, str], bytes] = {}
        #: Every message that was ever sent: (from, to, message).
        self.sent: list[tuple[str, str, Message]] = []
        self.trace: list[str] = []
        self.tracing = False
        #: Decodes frames; systems built on the log have more messages.
        self.decode: Callable[[bytes], Message] = wire.decode
        #: Duration of a store's flush, in ns.
        self.flush_ns = 0
        #: The same, of single nodes.
        self.slow_flushes: dict[str, int] = {}
        #: Messages take the short path, as in the driver; how many inserts and other ones did.
        self.has_short_path = True
        self.plain_inserts = 0
        self.plain_messages: Counter[type[Message]] = Counter()
        #: Nodes whose short path has handled another message than an insert in this batch.
        self._has_other_acks: set[str] = set()
        #: Messages in flight: arrival time, a number, destination, route, frame.
        self._queue: list[tuple[int, int, str, bytes, bytes]] = []
        self._count = 0
        #: Time of the next flush of a node's store, and the number of flushed entries.
        self._flushes: dict[str, int] = {}
        self._flushed: dict[str, int] = {}
        #: Messages held until the store is flushed (level `disk`).
        self._held: dict[str, list[tuple[bytes, Message]]] = {}
        self._configs: dict[str, ReplicaConfig] = {}
        #: The wakeups of storage servers that were not stepped since.
        self._wakeups: dict[str, int | None] = {}

    def add(self, name: str, node: Node, store: MemoryStore | None = None) -> None:
        self.nodes[name] = node
        if store is not None:
            self.stores[name] = store

    def start(self, config: ReplicaConfig, *, limbo: bool = False) -> Replica:
        """Start a storage server with an empty store."""
        self._configs[config.name] = config
        store = MemoryStore()
        incarnation = len(self._configs)
        replica = Replica(config, store, None, limbo=limbo, incarnation=incarnation, now=self.now)
        self.add(config.name, replica, store)
        return replica

    def kill(self, name: str) -> None:
        """Kill a node; messages to it, and entries that it did not flush, are lost."""
        self.down.add(name)
        self.paused.discard(name)
        self._queue = [item for item in self._queue if item[2] != name]
        heapq.heapify(self._queue)
        if name in self._flushes:
            self.stores[name].lose(self._flushed.get(name, 0))
        self._flushes.pop(name, None)
        self._held.pop(name, None)

    def restart(self, name: str, *, clean: bool = True) -> Replica:
        """Stop a storage server and start it again; messages in flight to it may be lost."""
        old = self.nodes[name]
        assert isinstance(old, Replica)
        self._count += 1
        if clean:
            self._flushes.pop(name, None)
        self.kill(name)
        self.down.discard(name)
        replica = Replica(
            self._configs[name], self.stores[name], old.checkpoint() if clean else None,
            limbo=not clean, incarnation=1000 + self._count, now=self.now,
        )  # fmt: skip
        self.nodes[name] = replica
        replica.check()
        return replica

    # --- messages ---

    def send(self, src: str, dst: str, message: Message, *, reply: bool = False) -> None:
        """Send a message; a reply arrives with the peer's name, others with a route."""
        if dst not in self.nodes or dst in self.down:
            return
        link = self.links.get((src, dst), self.link)
        frame = wire.encode(message)
        known = self._called.get((dst, src), src.encode())
        route = known if reply else b"<" + src.encode()
        self.sent.append((src, dst, message))
        if self.tracing:
            self.trace.append(f"{src} -> {dst}: {describe(message)}")
        for _ in range(2 if link.repeat() else 1):
            if not link.lose():
                self._count += 1
                at = self.now + link.delay()
                heapq.heappush(self._queue, (at, self._count, dst, route, frame))

    def _route(self, src: str, dst: bytes, message: Message) -> None:
        if dst.startswith(b"<"):
            self.send(src, dst[1:].decode(), message, reply=True)
        else:
            self.send(src, self._names.get((src, dst), dst.decode()), message)

    def inject(self, dst: str, event: Event) -> None:
        """Step a node with an event, and let it end the batch."""
        self._step(dst, event)
        self._step(dst, BatchEnd())

    def _step(self, name: str, event: Event) -> None:
        node = self.nodes[name]
        self._wakeups.pop(name, None)
        for effect in node.step(event, self.now):
            self._carry_out(name, effect)
        node.check()

    def _receive(self, name: str, route: bytes, message: Message) -> bool:
        """Pass a message to a node's short path, or step it; return whether it was stepped."""
        node = self.nodes[name]
        if self.has_short_path and isinstance(node, Replica):
            self._wakeups.pop(name, None)
            path = node.plain_inserts
            if isinstance(message, wire.Insert):
                ack = path.insert(route, message, self.now)
                if ack is not None:
                    self.plain_inserts += 1
                    if name in self._has_other_acks:
                        self._carry_out_short_path(name, node)
                    self._route(name, route, ack)
                    node.check()
                    return False
            elif isinstance(message, path.messages) and path.receive(route, message, self.now):
                self.plain_messages[type(message)] += 1
                self._has_other_acks.add(name)
                return False
            self._carry_out_short_path(name, node)
        self._step(name, Received(route, message))
        return True

    def _end_batch(self, name: str, *, is_stepped: bool) -> None:
        """End a batch: by the node's short path if no message was stepped, and none is due."""
        node = self.nodes[name]
        if self.has_short_path and isinstance(node, Replica):
            self._wakeups.pop(name, None)
            due = self.now if is_stepped else node.plain_inserts.end_batch(self.now)
            self._carry_out_short_path(name, node)
            if self.now < due:
                node.check()
                return
        self._step(name, BatchEnd())

    def _carry_out_short_path(self, name: str, node: Replica) -> None:
        self._has_other_acks.discard(name)
        effects = node.plain_inserts.pop_effects()
        for effect in sorted(effects, key=lambda effect: isinstance(effect, Persist)):
            self._carry_out(name, effect)

    def _carry_out(self, name: str, effect: Effect) -> None:
        match effect:
            case Send(dst, message):
                self._send_or_hold(name, dst, message)
            case Broadcast(dsts, message):
                for dst in dsts:
                    self._send_or_hold(name, dst, message)
            case Persist(entry):
                self.stores[name].append(entry)
                took = self.slow_flushes.get(name, self.flush_ns)
                self._flushes.setdefault(name, self.now + took)
            case Halt(reason):
                self.halts.append((name, reason))
                self.paused.add(name)
            case Stop():
                self.stopped.add(name)
            case Complete(id, result):
                self.completed[name, id] = result
            case Propose():
                self.proposed.append((name, effect))
            case RecordLevel(level):
                self.inject(name, LevelRecorded(level))
            case FlushBeforeSend():
                pass
            case Connect(called, endpoint):
                for other in self.nodes:
                    if address(other).endpoint == endpoint:
                        self._names[name, called] = other
                        self._called[name, other] = called
            case Disconnect():
                pass

    def _send_or_hold(self, name: str, dst: bytes, message: Message) -> None:
        """Send a message; at level `disk`, hold it until the flush, as the driver does."""
        config = self._configs.get(name)
        is_dirty = name in self._flushes and config is not None and config.durability == "disk"
        if is_dirty and needs_disk(message):
            self._held.setdefault(name, []).append((dst, message))
        else:
            self._route(name, dst, message)

    # --- time ---

    def run(self, duration: int) -> None:
        """Let time pass."""
        self.run_until(lambda: False, duration)

    def run_until(self, condition: Callable[[], bool], within: int = 10 * S) -> bool:
        """Let time pass until the condition holds; whether it did."""
        end = self.now + within
        steps = 0
        self._wakeups.clear()  # a test may have changed its nodes
        while not condition():
            at = self._next()
            if at is None or at > end:
                self.now = end
                return condition()
            steps = steps + 1 if at <= self.now else 0
            assert steps < MAX_STEPS, "a node requests wakeups for ever"
            self.now = max(self.now, at)
            self._advance()
        return True

    def _next(self) -> int | None:
        times = [self._queue[0][0]] if self._queue else []
        times += [at for name, at in self._flushes.items() if name not in self.paused]
        times += [at for _, at in self._next_wakeups()]
        return min(times, default=None)

    def _next_wakeups(self) -> Iterator[tuple[str, int]]:
        """Yield the nodes that run and request a wakeup, and its time."""
        known = self._wakeups
        for name, node in self.nodes.items():
            if name in self.paused or name in self.down:
                continue
            if name in known:
                at = known[name]
            else:
                at = node.next_wakeup()
                if isinstance(node, Replica):
                    known[name] = at
            if at is not None:
                yield name, at

    def _advance(self) -> None:
        """Deliver the due messages, one batch for each node, and wake the nodes that are due."""
        touched: dict[str, bool] = {}
        held: list[tuple[int, int, str, bytes, bytes]] = []
        while self._queue and self._queue[0][0] <= self.now:
            item = heapq.heappop(self._queue)
            _, _, dst, route, frame = item
            if dst in self.paused:
                held.append(item)
                continue
            touched[dst] = self._receive(dst, route, self.decode(frame)) or touched.get(dst, False)
        for at, count, *rest in held:
            heapq.heappush(self._queue, (max(at, self.now) + MS, count, *rest))  # type: ignore[misc]
        for name, is_stepped in touched.items():
            self._end_batch(name, is_stepped=is_stepped)
        for name, at in list(self._flushes.items()):
            if at <= self.now and name not in self.paused:
                del self._flushes[name]
                self._flushed[name] = len(self.stores[name].history)
                for dst, message in self._held.pop(name, []):
                    self._route(name, dst, message)
                self.inject(name, Persisted(self.stores[name].last_fseq))
        for name, at in self._next_wakeups():
            if at <= self.now:
                self._step(name, Wakeup())
                self._step(name, BatchEnd())


def describe(message: Message) -> str:
    """Return a message as one line of a trace: its kind and its main fields."""
    match message:
        case wire.Insert():
            return f"Insert seq={message.seq} after={message.after}"
        case wire.InsertAck():
            flag = "CONF" if message.confirmed else "SPEC"
            return f"InsertAck seq={message.seq} {flag} {message.gsns}"
        case wire.Forward():
            what = []
            for decision in message.decisions:
                match decision:
                    case Place():
                        body = "+body" if decision.body is not None else ""
                        what.append(f"Place{body} seq={decision.seq} {decision.gsns}")
                    case Skip():
                        what.append(f"Skip [{decision.start},{decision.stop})")
                    case Expire():
                        what.append("Expire")
            return f"Forward {message.first}: {'; '.join(what)} stable={message.stable}"
        case wire.Report():
            return f"Report held={message.replicated_up_to} durable={message.durable}"
        case wire.Resend():
            return f"Resend first={message.first} bodies={message.bodies}"
        case wire.Deliver():
            units = [unit.gsns for unit in message.units]
            return f"Deliver [{message.start},{message.frontier}) {units}"
        case wire.ReadReply():
            return f"ReadReply {message.gsn} {message.answer} stable={message.stable}"
        case wire.Refused():
            return f"Refused {message.code}"
        case wire.Subscribe() | wire.Credit():
            return f"{type(message).__name__} {message.subscription} credit={message.credit}"
        case wire.Want():
            return f"Want {message.gsn}"
    return type(message).__name__


def address(name: str) -> Address:
    port = 1024 + int.from_bytes(name.encode()[-8:], "big") % 60_000
    return Address(name, f"127.0.0.1:{port}")


def shard_names(shard: int, f: int) -> list[str]:
    return [f"shard-{shard}-{index}" for index in range(f + 1)]


def placements(shards: int, f: int) -> list[Placement]:
    return [
        Placement(shard, 1, "live", tuple(address(name) for name in shard_names(shard, f)))
        for shard in range(shards)
    ]


def first_lease(
    shards: int, *, epochs: int = 16, epoch_size: int = 1 << 24, epoch_ms: int = 10
) -> Lease:
    members = tuple(Member(shard, 1, 1) for shard in range(shards))
    return Lease(1, NO_DIGEST, 1, 0, epochs, epoch_size, epoch_ms, members)


def add_shard(
    world: World,
    shard: int,
    f: int = 1,
    *,
    durability: Literal["memory", "disk"] = "memory",
    **config: Any,
) -> list[Replica]:
    """Start the replicas of a shard, with a probe for the membership service."""
    if "mms-0" not in world.nodes:
        world.add("mms-0", Probe())
    names = shard_names(shard, f)
    replicas = []
    for index, name in enumerate(names):
        own = ReplicaConfig(
            name, address(name).endpoint, shard, index, tuple(map(address, names)),
            (address("mms-0"),), durability, 1, wire.Limits(), **config,
        )  # fmt: skip
        replicas.append(world.start(own))
    return replicas


def grant(
    world: World, lease: Lease, shards: int, f: int = 1, *, starts_in_us: int = 0, trim: int = 0
) -> None:
    """Announce a lease to every replica."""
    message = wire.LeaseAnnounced(
        CLUSTER, [run_of(lease)], starts_in_us, placements(shards, f), trim
    )
    for shard in range(shards):
        for name in shard_names(shard, f):
            if name in world.nodes:
                world.send("mms-0", name, message, reply=True)


def calm_world(shards: int = 1, f: int = 1, *, lease: Lease | None = None, **config: Any) -> World:
    """Return a world of shards with their first lease, and a probe `c` for a client."""
    world = World()
    for shard in range(shards):
        add_shard(world, shard, f, **config)
    world.add("c", Probe())
    grant(world, lease or first_lease(shards), shards, f)
    world.run(5 * MS)
    return world


def probe(world: World, name: str = "c") -> Probe:
    """Return the node of this name, which is a probe."""
    node = world.nodes[name]
    assert isinstance(node, Probe)
    return node


def insert(
    seq: int,
    *,
    shard: int = 0,
    client: bytes = b"c" * 16,
    first_incomplete: int = 1,
    predecessor: int = 0,
    after: int = 0,
    count: int = 1,
    size: int = 0,
    view: int = 1,
    copy: int = 0,
) -> wire.Insert:
    """Return an insert with payloads that identify it."""
    payloads = [b"%d/%d" % (seq, index) + bytes(size) for index in range(count)]
    body = encode_body(Body(seq, None, payloads))
    return wire.Insert(
        CLUSTER, shard, view, client, seq, first_incomplete, predecessor, after, count, body, copy
    )
