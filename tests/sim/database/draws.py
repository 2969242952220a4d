"""Plans of runs with a database, drawn from a seed beside the cluster and its faults."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

from tests.sim import plan as plans
from tests.sim.plan import Database, Fault, Plan
from tests.sim.rebuild import Loss

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What happens to coordinators, and how often.
_WEIGHTS: Final = {"kill": 10, "pause": 6, "isolate": 4, "cut": 5, "clog": 5, "skew": 2}


def draw(seed: int, *, faults: int | None = None, is_raft_real: bool | None = None) -> Plan:
    """Return the plan of a seed: that of the log's clients, with a database in their place.

    Args:
        seed: any number.
        faults: how many there are of servers; of coordinators, and how many in all, chance wills
            if None, and there are none else.
        is_raft_real: as for `tests.sim.plan.draw`.

    """
    random, known = Random(f"database {seed}"), Random(f"known states {seed}")
    drawn = plans.draw(seed, faults=faults, is_raft_real=is_raft_real, has_regions=False)
    plan = drawn._replace(
        owners=0,  # there are no clients of the log
        faults=tuple(fault for fault in drawn.faults if "owner-" not in " ".join(fault.targets)),
        writers=random.choice((1, 2, 3, 4)),
        readers=random.choice((1, 2)),
        calls=random.choice((10, 60, 200)),
        lanes=random.choice((1, 2, 4, 8)),
        think_us=random.choice((0, 2_000, 50_000)),
        database=Database(
            coordinators=random.choice((1, 2, 2, 3)),
            checkpoint_every=random.choice((20, 60, 200)),
            decisions=random.choice((100, 1_000)),
            segment_bytes=random.choice((500, 2_000)),
            inline_bytes=random.choice((20, 100, 16 * 1024)),
            cache_bytes=random.choice((0, 200, 1_000_000)),
            quiet_replies=known.choice((0, 0, 1, 8)),
            known_ms=known.choice((5, 1_000)),
        ),
    )
    count = random.choice((0, 1, 2, 4, 8)) if faults is None else 0
    kinds = random.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=count)
    more = [_draw(random, plan, kind) for kind in kinds]
    if faults is None and plan.forgets_soon and not plan.naps:
        more.append(_draw_sleep(plan))
    return plan._replace(faults=tuple(sorted([*_promised(plan), *more])))


def _promised(plan: Plan) -> Sequence[Fault]:
    """Return the faults after which no loss is allowed: a database tolerates no loss."""
    if plan.durability == "disk":
        return plan.faults
    return [
        f._replace(amount=Loss.without_records(f.amount)) if f.kind == "rebuild" else f
        for f in plan.faults
        if f.kind != "power-all"
    ]


def _draw_sleep(plan: Plan) -> Fault:
    """Return a coordinator's machine that is suspended where clients' machines are."""
    random = Random(f"sleep of a coordinator {plan.seed}")
    at_ms, for_ms = random.randrange(plan.span_ms), random.choice((3_000, 12_000, 25_000))
    return Fault(at_ms, "suspend", (random.choice(plan.coordinators),), for_ms)


def _draw(random: Random, plan: Plan, kind: str) -> Fault:
    """Return a fault that meets a coordinator."""
    name = random.choice(plan.coordinators)
    at_ms = random.randrange(plan.span_ms)
    for_ms = random.choice((20, 300, 1_200, 3_000))
    if kind == "kill":
        return Fault(at_ms, kind, (name,))
    if kind in {"cut", "clog"}:
        other = random.choice([*plan.servers, "mms-0", "writer-0", "writer-1"])
        pair = (name, other)
        return Fault(at_ms, kind, random.choice((pair, pair[::-1], pair + pair[::-1])), for_ms)
    amount = random.choice((-200, -20, 20, 200)) if kind == "skew" else 0
    return Fault(at_ms, kind, (name,), for_ms, amount)
