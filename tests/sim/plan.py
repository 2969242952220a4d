"""Plan of a run, drawn from a seed: cluster, workload, faults, changes of shards.

A plan is data: equal plans give equal runs, and a plan with fewer faults is another plan. An
operator's changes (`CHANGES`) are listed among the faults; they have a random stream of their own.
`python -m tests.sim --faults` accepts the text form of both (tests/sim/fault_text).
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.sim import regions
from tests.simulator.kernel import MS, US
from tests.simulator.network import Conditions

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.types import Durability

#: Weight of each kind of fault.
WEIGHTS: Final = {
    "kill": 10,
    "stop": 3,
    "power": 6,
    "pause": 6,
    "cut": 6,
    "clog": 4,
    "isolate": 4,
    "skew": 3,
    "slow-disk": 3,
    "full-disk": 2,
    "fail-disk": 2,
    "crash": 4,
    "rot": 2,
    "kill-mms": 3,
    "kill-fh": 4,
    "lead-mms": 3,
    "lead-fh": 3,
    "kill-client": 2,
    "power-all": 1,
}

#: Faults that outlast a silent client's session, with weights. A plan with one of them has a short
#: session expiry.
SLEEPS: Final = {"offline": 3, "suspend": 3, "pause": 2}
#: Kinds of this stream only.
_ONLY_SLEEPS: Final = frozenset({"offline", "suspend"})
#: Temporary refusals of a machine, with weights.
REFUSALS: Final = {"no-descriptors": 1}
#: Faults of whole regions, with weights.
REGION_FAULTS: Final = {
    "cut-region": 3,
    "lose-region": 2,
    "destroy-region": 2,
    "power-region": 2,
    "part-regions": 2,
    "slow-region": 2,
}
#: Those that last no time.
_OF_A_MOMENT: Final = frozenset({"destroy-region", "power-region"})
#: One plan with regions of this many has servers whose labels change.
_RELABELLED_ONE_IN: Final = 3
#: Number of runs of leases that are granted while no server is notified: more than a server keeps,
#: and more than a frame holds, which is small in these runs.
AGED_RUNS: Final = 3_000
#: One plan of this number has a history of that length.
_AGED_ONE_IN: Final = 20
#: One plan of this many has a rebuild of the membership service.
_REBUILT_ONE_IN: Final = 12

#: An operator's changes, with weights.
CHANGES: Final = {"add-shard": 5, "remove-shard": 4, "finalize-shard": 2}
#: The amount of a `set-level` fault: the level is raised to `disk`; another one: lowered.
RAISE: Final = 1
LOWER: Final = 2
#: Bit flips in the files of a service's node, in runs with real consensus; they have a random
#: stream of their own.
ROT: Final = ("rot-mms", "rot-fh")
#: Faults drawn along with a change, of its shard or of a process that it needs.
_BESIDE_CHANGES: Final = (
    "kill", "kill", "power", "pause", "isolate", "stop", "kill-mms", "lead-mms", "kill-fh",
)  # fmt: skip


#: Share of appends, in one plan of two.
_APPENDS: Final = 0.3


class Fault(NamedTuple):
    """A fault or a change. A fault that does not fit (a kill of a dead server) does nothing.

    A change names its shard: `shard-2`. It always fits; the membership service may refuse it.
    """

    #: Start, in milliseconds since the cluster was whole.
    at_ms: int
    kind: str
    #: The target processes.
    targets: tuple[str, ...] = ()
    #: Duration in milliseconds.
    for_ms: int = 0
    #: For a skew: parts per thousand by which the clock is fast; for a failing disk: the call.
    amount: int = 0

    def __str__(self) -> str:
        rest = [f"{self.for_ms}ms"] if self.for_ms else []
        rest += [f"*{self.amount}"] if self.amount else []
        return " ".join([str(self.at_ms), self.kind, *self.targets, *rest])


class Database(NamedTuple):
    """A database in the log, with small limits, so that rare events are frequent."""

    coordinators: int
    #: Records between checkpoints.
    checkpoint_every: int
    #: Number of remembered decisions.
    decisions: int
    #: Bytes of the cleaner's segments, and of the dead values that make a round due.
    segment_bytes: int
    #: Maximum bytes of an inline value, and of a coordinator's cache.
    inline_bytes: int
    cache_bytes: int
    #: Compare each decision with a model's; otherwise only the clients' results are judged.
    has_model: bool = True
    #: Replies without another client's change after which a client uses the states that it knows,
    #: and the time after a reply during which it does.
    quiet_replies: int = 0
    known_ms: int = 1_000


class Plan(NamedTuple):
    """The plan of one run."""

    seed: int
    shards: int
    f: int
    durability: Durability
    #: Numbers of nodes of the membership service and of the failure handler.
    mms: int
    handlers: int
    writers: int
    readers: int
    #: Calls of each writer, if there is time.
    calls: int
    #: Concurrent calls, and maximum pause between calls in microseconds.
    lanes: int
    think_us: int
    conditions: Conditions
    #: Period for the start of faults, and whether clients are silent for longer than the session
    #: expiry.
    span_ms: int
    naps: bool
    faults: tuple[Fault, ...]
    #: Use the real consensus library in virtual time instead of the model.
    is_raft_real: bool = False
    #: Clients use this database instead of the log.
    database: Database | None = None
    #: Maximum number of sessions of a server; 0: the default.
    sessions: int = 0
    #: Bytes of log between session tables, and of a table's part (also of answers in a state
    #: transfer); 0: the defaults.
    table_bytes: int = 0
    part_bytes: int = 0
    #: Number of records of large calls; 0: no large calls.
    bulk: int = 0
    #: The membership service publishes leases, as it does to many members.
    publishes: bool = False
    #: A process receives what was sent to it while it was dead.
    queues: bool = False
    #: Share of the inserts and tail queries that are sealed; clients call `seal`, too, and readers
    #: `barrier`.
    appends: float = 0.0
    #: Number of readers that speculate.
    speculators: int = 0
    #: Number of clients that claim cursors.
    owners: int = 0
    #: Number of clients that write rows, and repeat them. The readers then know the rows before
    #: their start; without a trim, each row counts once.
    rows: int = 0
    #: The regions of all processes.
    regions: regions.Regions | None = None

    @property
    def forgets_soon(self) -> bool:
        """Whether sessions of clients that are silent for a few seconds expire."""
        return self.naps or any(fault.kind in _ONLY_SLEEPS for fault in self.faults)

    @property
    def coordinators(self) -> list[str]:
        """The names of the database's coordinators."""
        count = self.database.coordinators if self.database is not None else 0
        return [f"coordinator-{i}" for i in range(count)]

    @property
    def servers(self) -> list[str]:
        """The names of the storage servers."""
        return [server_name(s, i) for s in range(self.shards) for i in range(self.f + 1)]

    @property
    def added(self) -> list[str]:
        """The names of the storage servers of added shards."""
        added = {shard_of(fault) for fault in self.faults if fault.kind == "add-shard"}
        shards = sorted(added.difference(range(self.shards)))
        return [server_name(s, i) for s in shards for i in range(self.f + 1)]

    @property
    def nodes(self) -> list[str]:
        """The names of all storage servers, of the services' nodes and of the coordinators."""
        mms = [f"mms-{i}" for i in range(self.mms)]
        handlers = [f"fh-{i}" for i in range(self.handlers)]
        return [*self.servers, *self.added, *mms, *handlers, *self.coordinators]


def server_name(shard: int, index: int) -> str:
    """Return the name of a storage server."""
    return f"shard-{shard}-{index}"


def shard_of(change: Fault) -> int:
    """Return the number of a change's shard."""
    return int(change.targets[0].removeprefix("shard-"))


def draw(
    seed: int,
    *,
    faults: int | None = None,
    is_raft_real: bool | None = None,
    has_regions: bool | None = None,
) -> Plan:
    """Return the plan of a seed.

    Args:
        seed: any number.
        faults: number of faults, and no changes; None: random.
        is_raft_real: use the real consensus library, or the model; None: random.
        has_regions: its processes are in several regions; None: random, and with `faults`: no.

    """
    random = Random(f"plan {seed}")
    f = random.choice((1, 1, 1, 1, 2, 2, 0))
    naps = random.random() < 0.1
    is_drawn = random.random() < 0.15
    plan = Plan(
        seed=seed,
        shards=random.choice((1, 2, 2, 3)) if f < 2 else random.choice((1, 2)),
        f=f,
        durability=random.choice(("memory", "memory", "disk")),
        mms=random.choice((1, 3)),
        handlers=random.choice((1, 1, 3)),
        writers=random.choice((1, 2, 3, 4)),
        readers=random.choice((1, 2)),
        calls=random.choice((10, 30, 60)),
        lanes=random.choice((1, 1, 2, 8)),
        think_us=random.choice((0, 2_000, 50_000, 200_000)),
        conditions=random.choice(_WEATHER),
        span_ms=60_000 if naps else random.choice((300, 2_000, 6_000)),
        naps=naps,
        faults=(),
        is_raft_real=is_drawn if is_raft_real is None else is_raft_real,
    )
    count = random.choice((0, 1, 2, 3, 4, 6, 9, 14)) if faults is None else faults
    kinds = random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    drawn = [_DRAWS.get(kind, _draw_one)(random, plan, kind) for kind in kinds]
    if faults is None:
        drawn += draw_changes(plan)
        drawn += draw_sleeps(plan)
        drawn += draw_refusals(plan)
        drawn += draw_rot(plan)
        drawn += draw_age(plan)
        drawn += draw_rebuild(plan)
        drawn += draw_levels(plan)
        plan = _aged(plan)
        plan = plan._replace(publishes=Random(f"publications {seed}").random() < 1 / 3)
        plan = plan._replace(queues=Random(f"queues {seed}").random() < 1 / 2)
        plan = plan._replace(appends=Random(f"appends {seed}").choice((0.0, _APPENDS)))
        plan = plan._replace(speculators=Random(f"speculators {seed}").choice((0, 1)))
        plan = plan._replace(owners=Random(f"owners {seed}").choice((0, 0, 1, 3)))
        drawn += draw_zombies(plan)
    if has_regions is None:
        has_regions = faults is None and regions.is_drawn(seed)
    if has_regions:
        plan = plan._replace(regions=regions.draw(seed, plan.f, plan.shards))
        if faults is None:
            drawn += draw_region_faults(plan) + draw_relabels(plan) + draw_region_changes(plan)
            drawn += draw_stranded(plan)
    return plan._replace(faults=tuple(sorted(drawn)))


def _aged(plan: Plan) -> Plan:
    """Return the plan with session limits, for one plan of three."""
    random = Random(f"aged {plan.seed}")
    if random.random() > 1 / 3:
        return plan
    return plan._replace(
        sessions=random.choice((0, 0, 1, 2, 3, 5)),
        table_bytes=random.choice((0, 300, 3_000)),
        part_bytes=random.choice((1, 200, 1_000)),
        bulk=random.choice((0, 0, 0, 150)),
    )


def draw_changes(plan: Plan) -> list[Fault]:
    """Return changes, in one plan of three, with faults at the same time."""
    random = Random(f"changes {plan.seed}")
    if random.random() > 1 / 3:
        return []
    shards = list(range(plan.shards))
    drawn: list[Fault] = []
    at_ms = 0
    for _ in range(random.choice((1, 2, 3, 4))):
        # At a random time, together with the previous one, or soon after it.
        later = (0, random.randrange(60), random.randrange(1_500))
        at_ms = random.choice((_when(random, plan), *(at_ms + after for after in later)))
        (kind,) = random.choices(list(CHANGES), list(CHANGES.values()))
        if kind == "add-shard":
            shards.append(shards[-1] + 1)
        shard = shards[-1] if random.random() < 0.4 else random.choice(shards)
        shard = shards[-1] if kind == "add-shard" else shard
        drawn.append(Fault(at_ms, kind, (f"shard-{shard}",)))
        if random.random() < 0.5:
            drawn.append(_draw_beside(random, plan, drawn[-1]))
    return drawn


def draw_sleeps(plan: Plan) -> list[Fault]:
    """Return suspended and offline machines, in one plan of six."""
    random = Random(f"sleeps {plan.seed}")
    if random.random() > 1 / 6:
        return []
    clients = [f"writer-{i}" for i in range(plan.writers)]
    drawn: list[Fault] = []
    for _ in range(random.choice((1, 2, 3))):
        (kind,) = random.choices(list(SLEEPS), list(SLEEPS.values()))
        is_of_server = kind == "suspend" and random.random() < 0.3
        name = random.choice(plan.servers if is_of_server else clients)
        for_ms = random.choice((300, 3_000, 9_000, 12_000, 12_000, 25_000))
        drawn.append(Fault(_when(random, plan), kind, (name,), for_ms))
    return drawn


def draw_refusals(plan: Plan) -> list[Fault]:
    """Return processes without descriptors, in one plan of six; mostly all of a shard at once."""
    random = Random(f"refusals {plan.seed}")
    if random.random() > 1 / 6:
        return []
    drawn: list[Fault] = []
    for _ in range(random.choice((1, 2, 4))):
        shard = random.randrange(plan.shards)
        replicas = tuple(server_name(shard, i) for i in range(plan.f + 1))
        alone = random.choice([*replicas, "mms-0", "fh-0"])
        targets = replicas if random.random() < 0.6 else (alone,)
        for_ms = random.choice((20, 300, 1_200, 3_000))
        drawn.append(Fault(_when(random, plan), "no-descriptors", targets, for_ms))
    return drawn


def draw_rot(plan: Plan) -> list[Fault]:
    """Return bit flips in the services' files, in half of the plans with real consensus."""
    random = Random(f"rot {plan.seed}")
    if not plan.is_raft_real or random.random() > 1 / 2:
        return []
    kinds = random.choices(ROT, k=random.choice((1, 2, 4)))
    return [_draw_node(random, plan, kind) for kind in kinds]


def draw_age(plan: Plan) -> list[Fault]:
    """Return a long history of leases, in one plan of twenty, and a server that needs its end."""
    random = Random(f"age {plan.seed}")
    if random.randrange(_AGED_ONE_IN):
        return []
    at_ms = _when(random, plan)
    kind = random.choice(("kill", "kill", "power", "stop"))
    after = Fault(at_ms + random.randrange(1_500), kind, (random.choice(plan.servers),))
    return [Fault(at_ms, "age", amount=AGED_RUNS), after]


def draw_rebuild(plan: Plan) -> list[Fault]:
    """Return a rebuild of the membership service, in one plan of twelve."""
    random = Random(f"rebuild {plan.seed}")
    if plan.is_raft_real or random.randrange(_REBUILT_ONE_IN):
        return []
    return [Fault(_when(random, plan), "rebuild", amount=random.randrange(16) or 16)]


def draw_levels(plan: Plan) -> list[Fault]:
    """Return changes of the servers' durability levels, in one plan of six.

    In half of them, the power of all machines is cut about then.
    """
    random = Random(f"levels {plan.seed}")
    if random.random() > 1 / 6:
        return []
    amounts = random.choice(((RAISE,), (LOWER,), (RAISE, LOWER), (LOWER, RAISE)))
    drawn: list[Fault] = []
    for amount in amounts:
        at_ms = _when(random, plan)
        for name in random.sample(plan.servers, len(plan.servers)):
            drawn.append(Fault(at_ms, "set-level", (name,), amount=amount))
            at_ms += random.choice((0, 0, 5, 100))
    if random.random() < 0.5:
        at_ms = random.choice(drawn).at_ms + random.choice((0, 1, 5, 20, 200))
        drawn.append(Fault(at_ms, "power-all"))
    return drawn


def draw_zombies(plan: Plan) -> list[Fault]:
    """Return faults of the clients that claim cursors, most of them longer than a lease."""
    random = Random(f"zombies {plan.seed}")
    drawn: list[Fault] = []
    for _ in range(random.choice((0, 1, 3)) if plan.owners else 0):
        kind = random.choice(("pause", "pause", "offline", "kill-client"))
        name = f"owner-{random.randrange(plan.owners)}"
        for_ms = 0 if kind == "kill-client" else random.choice((100, 500, 1_000, 3_000))
        drawn.append(Fault(_when(random, plan), kind, (name,), for_ms))
    return drawn


def draw_region_faults(plan: Plan) -> list[Fault]:
    """Return faults of whole regions, in three of four plans with regions."""
    random = Random(f"region faults {plan.seed}")
    drawn: list[Fault] = []
    for _ in range(random.choice((0, 1, 2, 3))):
        (kind,) = random.choices(list(REGION_FAULTS), list(REGION_FAULTS.values()))
        for_ms = 0 if kind in _OF_A_MOMENT else random.choice((300, 1_200, 3_000, 8_000))
        targets = random.sample(regions.REGIONS, 2 if kind == "part-regions" else 1)
        drawn.append(Fault(_when(random, plan), kind, tuple(targets), for_ms))
    return drawn


def draw_stranded(plan: Plan) -> list[Fault]:
    """Return a region that goes on alone, in plans with both services and each shard there."""
    random = Random(f"stranded {plan.seed}")
    here, places = regions.REGIONS[0], plan.regions
    is_everywhere = places is not None and all(here in places.shard(s) for s in range(plan.shards))
    if plan.mms > 1 or plan.handlers > 1 or not (plan.f and is_everywhere):
        return []
    amount, for_ms = random.choice((1, 1, 5, 8)), random.choice((3_000, 14_000, 18_000))
    return [Fault(_when(random, plan), "strand-region", (here,), for_ms, amount)]


def draw_region_changes(plan: Plan) -> list[Fault]:
    """Return shards that come and go across regions, in half of the plans with regions."""
    random = Random(f"region changes {plan.seed}")
    drawn: list[Fault] = []
    added = plan.shards
    for _ in range(random.choice((0, 0, 0, 1, 2, 3))):
        is_new = random.random() < 2 / 3
        shard = added if is_new else random.randrange(added)
        added += is_new
        kind = "add-shard" if is_new else random.choice(("remove-shard", "finalize-shard"))
        drawn.append(Fault(_when(random, plan), kind, (f"shard-{shard}",)))
    return drawn


def draw_relabels(plan: Plan) -> list[Fault]:
    """Return servers that restart with another region, in one of three plans with regions."""
    random = Random(f"relabels {plan.seed}")
    if random.randrange(_RELABELLED_ONE_IN):
        return []
    names = random.choices(plan.servers, k=random.choice((1, 2, 3)))
    count = len(regions.REGIONS)
    return [
        Fault(_when(random, plan), "relabel", (name,), amount=random.randint(1, count))
        for name in names
    ]


def _draw_beside(random: Random, plan: Plan, change: Fault) -> Fault:
    """Return faults just before, during, or after a change."""
    kind = random.choice(_BESIDE_CHANGES)
    fault = _DRAWS.get(kind, _draw_one)(random, plan, kind)
    if fault.targets and fault.targets[0] in plan.servers:
        fault = fault._replace(
            targets=(server_name(shard_of(change), random.randrange(plan.f + 1)),)
        )
    at_ms = change.at_ms + random.choice((-1_500, -300, 0, 0, 300, 1_500))
    return fault._replace(at_ms=max(at_ms + random.randrange(200), 0))


#: From a good local network to one that loses one frame in twenty.
_WEATHER: Final = (
    Conditions(),
    Conditions(delay_ns=(20 * US, 2 * MS)),
    Conditions(delay_ns=(20 * US, 2 * MS), loss=0.01, repeats=0.02),
    Conditions(delay_ns=(50 * US, 10 * MS), loss=0.05, repeats=0.05, stalls=0.01),
)


def _when(random: Random, plan: Plan) -> int:
    return random.randrange(plan.span_ms)


def _how_long(random: Random) -> int:
    return random.choice((20, 300, 1_200, 3_000))


def _draw_one(random: Random, plan: Plan, kind: str) -> Fault:
    """Return a temporary fault of one storage server."""
    return Fault(_when(random, plan), kind, (random.choice(plan.servers),), _how_long(random))


def _draw_instant(random: Random, plan: Plan, kind: str) -> Fault:
    return _draw_one(random, plan, kind)._replace(for_ms=0)


def _draw_link(random: Random, plan: Plan, kind: str) -> Fault:
    """Return a fault of the links between a server and another process, one way or both."""
    server = random.choice(plan.servers)
    peers = [name for name in plan.servers if name != server and name[:7] == server[:7]]
    others = [*peers, *peers, "mms-0", "fh-0", "writer-0"]
    pair = (server, random.choice(others))
    pairs = random.choice((pair, pair[::-1], pair + pair[::-1]))
    return Fault(_when(random, plan), kind, pairs, _how_long(random))


def _draw_skew(random: Random, plan: Plan, kind: str) -> Fault:
    fault = _draw_one(random, plan, kind)
    return fault._replace(amount=random.choice((-200, -20, 20, 200)))


def _draw_failing_disk(random: Random, plan: Plan, kind: str) -> Fault:
    """Return a fault of one of the next calls of a disk."""
    return _draw_one(random, plan, kind)._replace(for_ms=3_000, amount=random.randint(1, 12))


def _draw_node(random: Random, plan: Plan, kind: str) -> Fault:
    """Return a fault of a node of a replicated service."""
    service = kind.rpartition("-")[2]
    count = plan.mms if service == "mms" else plan.handlers
    return Fault(_when(random, plan), kind, (f"{service}-{random.randrange(count)}",))


def _draw_leader(random: Random, plan: Plan, kind: str) -> Fault:
    """Return a temporary isolation of a service's leader from its other nodes."""
    return Fault(_when(random, plan), kind, (), _how_long(random))


def _draw_client(random: Random, plan: Plan, kind: str) -> Fault:
    return Fault(_when(random, plan), kind, (f"writer-{random.randrange(plan.writers)}",))


def _draw_all(random: Random, plan: Plan, kind: str) -> Fault:
    return Fault(_when(random, plan), kind)


_DRAWS: Final[dict[str, Callable[[Random, Plan, str], Fault]]] = {
    "kill": _draw_instant,
    "stop": _draw_instant,
    "power": _draw_instant,
    "rot": _draw_instant,
    "cut": _draw_link,
    "clog": _draw_link,
    "skew": _draw_skew,
    "fail-disk": _draw_failing_disk,
    "crash": _draw_failing_disk,
    "kill-mms": _draw_node,
    "kill-fh": _draw_node,
    "lead-mms": _draw_leader,
    "lead-fh": _draw_leader,
    "kill-client": _draw_client,
    "power-all": _draw_all,
}
