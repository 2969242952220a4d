"""A region that is killed (W7), and one that is cut off (W8), under load in all three."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from region_trial.schedule import KINDS, RegionFault
from region_trial.trial import RegionTrial, Shape

if TYPE_CHECKING:
    from wan.network import Network

Figures = dict[str, Any]

_KINDS: Final = {"W7": "kill", "W8": "cut"}
_CALM_S: Final = 4.0


def of_region(network: Network, scale: float) -> Figures:
    """Return the verdicts of `region_faults.py` on A killed and A cut off, with windows."""
    found: Figures = {}
    with tempfile.TemporaryDirectory(prefix="regions-") as folder:
        with RegionTrial(network, Path(folder) / "trial", Shape()) as trial:
            for kind in _KINDS.values():
                trial.watch(_CALM_S)
                seconds = max(8.0, KINDS[kind] * scale)
                trial.inject(RegionFault(kind, "A", "B", seconds), lambda _: None)
            trial.watch(_CALM_S)
            verdict = trial.judge()
        for index, name in enumerate(_KINDS):
            found[name] = {
                **verdict.rows[index],
                "broken": len(verdict.broken),
                "not_credible": verdict.not_credible,
                "windows": verdict.windows[index],
            }
    return found
