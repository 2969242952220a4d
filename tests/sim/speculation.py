"""Speculation in virtual time: `python -m tests.sim.speculation [PART ...] [--hop-us 300] ...`.

From the insert to the delivery and to the output of an application that computes on batches
(tests/sim/applications.py), behind a gate, by a subscription and by a speculation. A hop takes
`--hop-us`, give or take a fifth, a turn of consensus 20 µs, a flush at level `disk` `--flush-ms`,
and nothing else takes time. The parts are figures of SpecLog (S 6):

    compute      Fig. 7 to 9: levels and computing times, parts of the latency, inserts beside
    shards       Fig. 14: numbers of shards
    bursts       Fig. 10: one shard gets five times its rate for 100 ms, with and without lag-fix
    steps        Fig. 11: one shard's rate changes every second
    leases       Fig. 12: a lease has 4 to 64 epochs
    changes      Fig. 13: shards are added and removed
    straggler    Fig. 15: a shard is late, and is parked
    kills        Fig. 17: a primary is killed
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import mms.leases
from tests.sim.applications import KINDS, Setting, run_application
from tests.sim.disturbed_applications import Changing, Killed, Straggling, Uneven
from tests.sim.latency import World, run_in
from tests.simulator.kernel import MS, US

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.sim.applications import Application

Figures = dict[str, Any]

_LEVELS: Final = ("memory", "disk")
COMPUTE_MS: Final = (0.5, 1.5, 4.0, 50.0)
_SHARDS: Final = (2, 4, 8, 16)
_LEASE_EPOCHS: Final = (4, 16, 64)
_COMPARED: Final = (("gate", "subscribe"), ("gate", "speculate"), ("subscribe", "speculate"))
_UNGATED: Final = ("subscribe", "speculate")
#: The computing time of a batch in all other parts.
_USUAL_MS: Final = 1.5
_BURST: Final = 5.0
_STEPS: Final = (1.0, 1.5, 1.0, 0.5)
#: Mean pause between inserts beside bursts and steps: the log has two shards.
_UNEVEN_PAUSE_NS: Final = 2 * MS


def quantiles_ms(values: Iterable[int]) -> dict[str, float]:
    """Return p50 and p99 in ms of durations in ns."""
    ordered = sorted(values)
    return {f"p{p}_ms": round(ordered[len(ordered) * p // 100] / MS, 3) for p in (50, 99)}


class Bench:
    """The options of a run, and the parts."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options: Final = options
        hop_ns = options.hop_us * US
        self._hop_ns: Final = (hop_ns * 4 // 5, hop_ns * 6 // 5)

    def world(self, level: str = "memory", shards: int = 0, *, lag_fix: bool = True) -> World:
        """Return a cluster of the options; by default with their number of shards."""
        options = self._options
        flush_ns = round(options.flush_ms * MS) if level == "disk" else 0
        shards = shards or options.shards
        durability = "disk" if level == "disk" else "memory"
        return World(shards, self._hop_ns, durability, flush_ns, lag_fix=lag_fix)  # type: ignore[arg-type]

    def setting(self, world: World, kind: str, compute_ms: float = _USUAL_MS) -> Setting:
        """Return what an application of the options does."""
        options = self._options
        return Setting(
            world, kind, round(options.pause_ms * MS), round(compute_ms * MS),
            round(options.t_ord_ms * MS),
        )  # fmt: skip

    def _run(self, setting: Setting) -> Application:
        return run_application(setting, self._options.count, self._options.seed)

    def compare(self, world: World, compute_ms: float) -> Figures:
        """Return the latencies of all kinds, the means of their parts, and the ratios of p50."""
        rows: Figures = {}
        for kind in KINDS:
            load = self._run(self.setting(world, kind, compute_ms))
            took = load.took()
            row = rows[kind] = {
                name: quantiles_ms(took[name]) for name in ("insert", "delivery", "output")
            }
            row["mean_ms"] = {
                name: round(fmean(took[name]) / MS, 3)
                for name in ("delivery", "queue", "compute", "wait")
            }
            row["failures"] = load.failures
        found: Figures = dict(rows)
        for name in ("insert", "delivery", "output"):
            for one, other in _COMPARED:
                ratio = rows[one][name]["p50_ms"] / rows[other][name]["p50_ms"]
                found[f"{name}_{one}/{other}"] = round(ratio, 2)
        return found

    # --- parts ---

    def compute(self) -> Figures:
        """Compare levels and computing times."""
        return {
            f"{level}, {compute_ms:g} ms": self.compare(self.world(level), compute_ms)
            for level in self._options.levels
            for compute_ms in self._options.compute_ms
        }

    def shards(self) -> Figures:
        """Compare numbers of shards."""
        return {
            f"{shards} shards": self.compare(self.world(shards=shards), _USUAL_MS)
            for shards in _SHARDS
        }

    def bursts(self) -> Figures:
        """Return the time to the output while a shard has a burst, and otherwise."""

        def factor(at_ms: int) -> float:
            return _BURST if at_ms % 500 < 100 else 1.0

        return self._uneven(factor, (True, False))

    def steps(self) -> Figures:
        """Return the time to the output for each rate of one shard."""
        return self._uneven(lambda at_ms: _STEPS[at_ms // 1000 % len(_STEPS)], (True,))

    def _uneven(self, factor: Callable[[int], float], lag_fixes: tuple[bool, ...]) -> Figures:
        found: Figures = {}
        for lag_fix in lag_fixes:
            for kind in _UNGATED:
                world = self.world(lag_fix=lag_fix)
                setting = self.setting(world, kind)._replace(pause_ns=_UNEVEN_PAUSE_NS)
                load = run_application(
                    setting, 4 * self._options.count, self._options.seed, partial(Uneven, factor)
                )
                assert isinstance(load, Uneven)
                found[f"{kind}, {'' if lag_fix else 'no '}lag-fix"] = {
                    f"rate {rate:g}": quantiles_ms(took)
                    for rate, took in sorted(load.outputs().items())
                } | {"failures": load.failures}
        return found

    def leases(self) -> Figures:
        """Compare lengths of leases."""
        found: Figures = {}
        for epochs in _LEASE_EPOCHS:
            with patch.multiple(mms.leases, _EPOCHS=epochs, _MIN_LEASE_MS=0):
                found[f"{epochs} epochs"] = self.compare(self.world(), _USUAL_MS)
        return found

    def changes(self) -> Figures:
        """Return the failures and the latency while shards are added and removed."""
        found: Figures = {}
        for kind in _UNGATED:
            setting = self.setting(self.world(shards=2), kind)
            load = run_in(setting.world, partial(Changing, setting=setting), self._options.seed)
            took = load.took()
            found[kind] = {
                "changes": sum(not change.refused for change in load.operator.changes),
                "delivery": quantiles_ms(took["delivery"]),
                "output": quantiles_ms(took["output"]),
                "failures": load.failures,
            }
        return found

    def straggler(self) -> Figures:
        """Return the time to the delivery before a shard is late, while it is, and after."""
        found: Figures = {}
        for kind in _UNGATED:
            setting = self.setting(self.world(shards=max(3, self._options.shards)), kind)
            load = run_in(setting.world, partial(Straggling, setting=setting), self._options.seed)
            found[kind] = {name: quantiles_ms(took) for name, took in load.deliveries().items()} | {
                "parked_after_ms": round((load.parked_at - load.late_at) / MS),
                "failures": load.failures,
            }
        return found

    def kills(self) -> Figures:
        """Return the time from a kill to the next confirmation, and what was withdrawn."""
        return {
            f"{kind}, {'alone' if is_alone else 'killed'}": self._kill(kind, is_alone=is_alone)
            for is_alone in (False, True)
            for kind in _UNGATED
        }

    def _kill(self, kind: str, *, is_alone: bool) -> Figures:
        options, setting = self._options, self.setting(self.world(shards=1), kind)
        begin = partial(Killed, setting=setting, is_alone=is_alone)
        loads = [
            run_in(setting.world, begin, seed)
            for seed in range(options.seed, options.seed + options.kills)
        ]
        withdrawn = [load.withdrawn for load in loads if load.failures]
        return {
            "confirmed_after": quantiles_ms(load.confirmed_at - load.killed_at for load in loads),
            "early": sum(len(load.early) for load in loads),
            "runs_with_a_failure": len(withdrawn),
            "withdrawn": sum(withdrawn),
            "most_withdrawn": max(withdrawn, default=0),
            "undone": sum(load.consumer.undone for load in loads),
        }


PARTS: Final = (
    "compute", "shards", "bursts", "steps", "leases", "changes", "straggler", "kills",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    found = argparse.ArgumentParser(
        prog="python -m tests.sim.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    found.add_argument("--hop-us", type=int, default=300, help="mean time of a hop")
    found.add_argument("--t-ord-ms", type=float, default=1, help="between two cuts of the gate")
    found.add_argument("--flush-ms", type=float, default=3, help="time of a flush at level disk")
    found.add_argument("--levels", nargs="+", choices=_LEVELS, default=_LEVELS)
    found.add_argument("--compute-ms", type=float, nargs="+", default=COMPUTE_MS)
    found.add_argument("--pause-ms", type=float, default=4, help="mean pause between two inserts")
    found.add_argument("--shards", type=int, default=2, help="where a part does not say otherwise")
    found.add_argument("--count", type=int, default=1000, help="counted records of a run")
    found.add_argument("--kills", type=int, default=50, help="runs of each kind")
    found.add_argument("--seed", type=int, default=7)
    found.add_argument("--json", type=Path, help="where to write all figures")
    return found


def main() -> None:
    """Print a line for each figure."""
    options = parser().parse_args()
    bench, figures = Bench(options), {}
    for part in options.parts or PARTS:
        figures[part] = getattr(bench, part)()
        sys.stdout.write(f"{part}\n")
        for name, row in figures[part].items():
            sys.stdout.write(f"  {name}\n")
            for key, value in row.items():
                sys.stdout.write(f"    {key}: {_text(value)}\n")
        sys.stdout.flush()
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def _text(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{key} {_text(each)}" for key, each in value.items())


if __name__ == "__main__":
    main()
