"""How often speculation is wrong: `python -m tests.sim.misspeculation [--kills N]`.

Each run has six writers without pauses, one reader that speculates, and a killed primary. `killed`:
nothing else goes wrong. `alone`: the primary is cut from its backup 3 ms before, so that it decides
what no backup gets. `alone, lossy`: 10 % of all frames are lost besides, and the others take 0.02
to 1 ms, so the copies of an insert overtake each other. (S Fig. 17.)
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

from tests.sim import run as runs
from tests.sim.mutants_of_speculation import lost_decisions
from tests.sim.mutation import LAN

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.plan import Plan
    from tests.sim.speculators import Speculator


def speculators(plan: Plan) -> list[Speculator]:
    """Execute a plan; return its readers that speculate."""
    found: list[Speculator] = []
    audit = runs.LogRun._audit

    def audited(self: runs.LogRun) -> int:
        found.extend(self.speculators)
        return audit(self)

    with patch.object(runs.LogRun, "_audit", audited):
        runs.run(plan)
    return found


def alone(seed: int) -> Plan:
    """Return a run whose primary decides alone for a moment, and dies."""
    return lost_decisions(seed)._replace(conditions=LAN)


def killed(seed: int) -> Plan:
    """Return a run whose primary dies."""
    plan = alone(seed)
    return plan._replace(faults=[fault for fault in plan.faults if fault.kind == "kill"])


DRAWS: Final[dict[str, Callable[[int], Plan]]] = {
    "killed": killed,
    "alone": alone,
    "alone, lossy": lost_decisions,
}


def main() -> None:
    """Print a line for each draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="runs of each draw")
    options = parser.parse_args()
    for name, draw in DRAWS.items():
        counts = [
            (one.early, one.failures, one.withdrawn)
            for seed in range(1, options.kills + 1)
            for one in speculators(draw(seed))
        ]
        early, failures, withdrawn = map(sum, zip(*counts, strict=True))
        each = [withdrawn / failures for _, failures, withdrawn in counts if failures]
        sys.stdout.write(
            f"{name}: {options.kills} kills, {early} early deliveries, {failures} failures in"
            f" {len(each)} runs; {withdrawn} deliveries withdrawn, a failure"
            f" {statistics.median(each or [0]):g} (p50), {max(each, default=0):g} (most)\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
