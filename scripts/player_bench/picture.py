"""The picture of the benchmark of players."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from metrics.picture import BLUE, GREY, OCHRE, axes

if TYPE_CHECKING:
    from pathlib import Path

Figures = dict[str, Any]


def draw(figures: Figures, path: Path) -> None:
    """Draw the delay over targets beside the floor, and the delays while a target is down."""
    with axes(path) as (left, right):
        rows = {name: row for name, row in figures.get("L1", {}).items() if isinstance(row, dict)}
        counts = [int(name.split()[0]) for name in rows]
        for key, color in (("player", BLUE), ("floor", GREY)):
            for figure, line in (("mean_ms", "-"), ("p99_ms", "--")):
                values = [row[key][figure] for row in rows.values()]
                label = f"{key}, {figure.removesuffix('_ms')}"
                left.plot(counts, values, line, marker="o", color=color, label=label)
        left.set(xlabel="push targets", ylabel="ms, from the player to the target", ylim=(0, None))
        down = figures.get("L8")
        if down is not None:
            right.plot(down["windows"], color=BLUE, label="the other 19")
            for key, label in (("killed_in_window", "down"), ("restarted_in_window", "up again")):
                right.axvline(down[key], color=OCHRE, linestyle=":", label=label)
            right.set(xlabel="s", ylabel="ms, p99 of each second", ylim=(0, None))
        for axis in (left, right):
            if axis.lines:
                axis.legend()
