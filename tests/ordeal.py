"""An ordeal: a cluster under load whose servers die, stand still and lose sight of each other.

Everything runs as in production but for sockets, files and consensus: the membership service, the
failure handler, storage servers, clients. All that is random comes from one seed, and time is
virtual. At the end everything heals by itself, and the log is held against what clients were told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from shard.replica import Replica
from tests.cluster import Client, PureCluster
from tests.world import MS, US, Link, S, shard_names
from ziplog.client.requests import FetchRequest
from ziplog.errors import OutcomeUnknownError, UnavailableError
from ziplog.types import RID_GENESIS, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.types import Durability

#: Everything must be whole, and every call answered, so long after the last failure.
HEALED = 60 * S


@dataclass(frozen=True)
class Trial:
    """What happens in an ordeal."""

    shards: int = 2
    f: int = 1
    clients: int = 3
    steps: int = 120
    durability: Durability = "memory"
    kinds: tuple[str, ...] = ("kill", "pause", "cut", "kill_service", "kill_handler")
    #: How likely a step is a failure.
    failures: float = 0.06
    loss: float = 0.01
    repeats: float = 0.02
    delay_us: int = 2000
    flush_us: int = 3000


@dataclass
class Insert:
    """One call of a client."""

    client: Client
    payloads: list[bytes]
    after: RecordId
    #: None while it is under way.
    result: Any = None
    rids: list[RecordId] = field(default_factory=list)


class Ordeal:
    """One run."""

    def __init__(self, seed: int, trial: Trial) -> None:
        self.trial = trial
        self.random = Random(seed)
        self.is_over = False
        link = Link(self._delay, self._chance(trial.loss), self._chance(trial.repeats))
        self.cluster = PureCluster(
            trial.shards, trial.f, link, handler=True, durability=trial.durability
        )
        self.world = self.cluster.world
        self.world.flush_ns = trial.flush_us * US
        self.cluster.run(5 * S)
        self.clients = [
            self.cluster.client(f"client-{index}", self._choose) for index in range(trial.clients)
        ]
        self.reader = self.cluster.client("reader")
        self.subscription = self.reader.subscribe()
        self.fetch: int | None = None
        self.delivered: list[Record] = []
        self.inserts: dict[tuple[str, int], Insert] = {}
        self.known: list[RecordId] = [RID_GENESIS]
        self._heals: list[tuple[int, Callable[[], None]]] = []
        #: What happened, for whoever looks into a failed seed.
        self.story: list[str] = []

    def _choose(self, _payload: bytes, _key: bytes | None, live: Any) -> int:
        return self.random.choice(list(live))

    def _delay(self) -> int:
        return self.random.randrange(20, 100 if self.is_over else self.trial.delay_us) * US

    def _chance(self, probability: float) -> Callable[[], bool]:
        return lambda: not self.is_over and self.random.random() < probability

    # --- what happens ---

    def run(self) -> None:
        """Let everything happen, heal, and check."""
        failures = [getattr(self, kind) for kind in self.trial.kinds]
        for _ in range(self.trial.steps):
            if self.random.random() < self.trial.failures:
                self.random.choice(failures)()
            else:
                self.insert()
            self._pass(self.random.choice((0, 1, 5, 50)) * MS)
        self.heal()
        self.judge()

    def _pass(self, duration: int) -> None:
        """Let time pass, and what is over, end."""
        cluster = self.cluster
        end = self.world.now + duration
        while True:
            due = min([end, *(at for at, _ in self._heals)])
            cluster.run(max(due - self.world.now, 0))
            for at, heal in list(self._heals):
                if at <= self.world.now:
                    self._heals.remove((at, heal))
                    heal()
            self._collect()
            if self.world.now >= end:
                return

    def _collect(self) -> None:
        """Take the results of calls, and what the subscriber got."""
        completed = self.world.completed
        for key, insert in self.inserts.items():
            if insert.result is None and key in completed:
                insert.result = completed.pop(key)
                if isinstance(insert.result, list):
                    insert.rids = insert.result
                    self.known += insert.rids
        if self.fetch is not None and (self.reader.name, self.fetch) in completed:
            result = completed.pop((self.reader.name, self.fetch))
            assert not isinstance(result, BaseException), result
            self.delivered += result.records
            self.fetch = None
        if self.fetch is None:
            request = FetchRequest(self.world.now + 1 * S, self.subscription, 1000)
            self.fetch = self.reader.begin(request)

    def insert(self) -> None:
        """Begin an insert, of one or several records."""
        random = self.random
        client = random.choice(self.clients)
        number = len(self.inserts)
        payloads = [b"%d/%d" % (number, part) for part in range(random.choice((1, 1, 1, 3)))]
        after = random.choice(self.known[-20:]) if random.random() < 0.5 else RID_GENESIS
        timeout = random.choice((200 * MS, 2 * S, 30 * S))
        call = client.begin(client.inserting(payloads, after, timeout))
        self.inserts[client.name, call] = Insert(client, payloads, after)

    def _server(self) -> str:
        shard = self.random.randrange(self.trial.shards)
        return self.random.choice(shard_names(shard, self.trial.f))

    def _may_fail(self, name: str) -> bool:
        """Whether one more failure is within what the shard tolerates (at level `disk`: any)."""
        shard = int(name.split("-")[1])
        views = [r.view for r in self.cluster.replicas() if r.shard == shard]
        healthy = [
            other for other in shard_names(shard, self.trial.f)
            if self._is_healthy(other, max(views))
        ]  # fmt: skip
        return self.trial.durability == "disk" or len(healthy) > 1

    def _is_healthy(self, name: str, view: int) -> bool:
        node = self.world.nodes[name]
        assert isinstance(node, Replica)
        state = node._state
        is_there = name not in self.world.down and name not in self.world.paused
        return is_there and state.state == "up" and state.view == view

    def kill(self) -> None:
        """A server dies, and what it had not flushed with it."""
        name = self._server()
        if name not in self.world.down and self._may_fail(name):
            self._tell("kill", name)
            self.cluster.kill(name, for_ns=self.random.choice((100, 700, 3000)) * MS)

    def kill_all(self) -> None:
        """The power fails."""
        self._tell("kill", "everything")
        for name in list(self.world.nodes):
            if name.startswith(("shard", "mms", "fh")) and name not in self.world.down:
                self.cluster.kill(name, for_ns=self.random.choice((300, 700)) * MS)

    def kill_service(self) -> None:
        """The membership service dies."""
        if "mms-0" not in self.world.down:
            self._tell("kill", "mms-0")
            self.cluster.kill("mms-0")

    def kill_handler(self) -> None:
        """The failure handler dies."""
        if "fh-0" not in self.world.down:
            self._tell("kill", "fh-0")
            self.cluster.kill("fh-0")

    def pause(self) -> None:
        """A server stands still for a while."""
        name = self._server()
        if name not in self.world.down and name not in self.world.paused:
            duration = self.random.choice((300, 1500, 3000, 7000))
            self._tell("pause", name, duration)
            self.world.paused.add(name)
            self._later(duration, lambda: self.world.paused.discard(name))

    def cut(self) -> None:
        """A server and somebody else lose sight of each other, in one direction or both."""
        name = self._server()
        shard = int(name.split("-")[1])
        others = [other for other in shard_names(shard, self.trial.f) if other != name]
        others += ["mms-0", "fh-0", "client-0"]
        other = self.random.choice(others)
        pairs = self.random.choice((
            [(name, other)], [(other, name)], [(name, other), (other, name)]
        ))  # fmt: skip
        duration = self.random.choice((300, 1500, 4000))
        self._tell("cut", pairs, duration)
        for pair in pairs:
            self.world.links[pair] = Link(lose=lambda: True)
            self._later(duration, lambda pair=pair: self.world.links.pop(pair, None))

    def _later(self, after_ms: int, heal: Callable[[], object]) -> None:
        self._heals.append((self.world.now + after_ms * MS, heal))  # type: ignore[arg-type]

    def _tell(self, *what: object) -> None:
        self.story.append(f"{self.world.now / S:.3f} {' '.join(map(str, what))}")

    # --- the end ---

    def heal(self) -> None:
        """No more failures: the cluster becomes whole by itself, and every call ends."""
        self.is_over = True
        for _, heal in self._heals:
            heal()
        self._heals = []
        self.world.links.clear()
        end = self.world.now + HEALED
        while not (self.cluster.is_whole() and all(i.result for i in self.inserts.values())):
            assert self.world.now < end, f"not whole after {HEALED / S:.0f} s: {self._states()}"
            self._pass(100 * MS)
        assert not self.world.halts, self.world.halts

    def _states(self) -> list[object]:
        placements = self.cluster.groups["mms-0"].machine.placements
        states = [(r.config.name, r.state, r.view) for r in self.cluster.replicas()]
        open_calls = [i.payloads for i in self.inserts.values() if not i.result]
        return [states, [(p.shard, p.state, p.view) for p in placements.values()], open_calls]

    def judge(self) -> None:
        """Hold the log against what was told."""
        log = self.cluster.client("auditor").read_all()
        end = self.world.now + HEALED
        while len(self.delivered) < len(log) and self.world.now < end:
            self._pass(100 * MS)
        assert self.delivered[: len(log)] == log, "the subscriber was given another log"
        at = {record.rid: record for record in log}
        by_payload: dict[bytes, RecordId] = {}
        for record in log:
            assert record.payload not in by_payload, f"{record.payload!r} is there twice"
            by_payload[record.payload] = record.rid
        for insert in self.inserts.values():
            self._judge_insert(insert, at, by_payload)
        self._judge_replicas()

    def _judge_insert(
        self, insert: Insert, at: dict[RecordId, Record], by_payload: dict[bytes, RecordId]
    ) -> None:
        for rid, payload in zip(insert.rids, insert.payloads, strict=False):
            assert rid in at, f"{payload!r} was acknowledged at {rid} and is gone"
            assert at[rid].payload == payload, f"{rid} holds {at[rid].payload!r}, not {payload!r}"
        there = [by_payload[p] for p in insert.payloads if p in by_payload]
        assert all(rid > insert.after for rid in there)
        assert there == sorted(there), "the records of one call changed their order"
        if isinstance(insert.result, UnavailableError) and len(insert.payloads) == 1:
            assert not there, f"{insert.payloads} certainly did not happen, and is there"
        if isinstance(insert.result, BaseException):
            assert isinstance(insert.result, UnavailableError | OutcomeUnknownError), insert.result

    def _judge_replicas(self) -> None:
        for shard in range(self.trial.shards):
            stores = [self.world.stores[name] for name in shard_names(shard, self.trial.f)]
            last = min(store.last_fseq for store in stores)
            logs = [[e for e in store.log if e.fseq <= last] for store in stores]
            first = max(log[0].fseq for log in logs) if all(logs) else 0
            logs = [[e for e in log if e.fseq >= first] for log in logs]
            assert all(log == logs[0] for log in logs), f"replicas of shard {shard} differ"
