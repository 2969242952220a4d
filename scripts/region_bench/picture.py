"""The picture of the benchmark of regions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from metrics.picture import BLUE, GREY, OCHRE, RED, axes

if TYPE_CHECKING:
    from pathlib import Path

Figures = dict[str, Any]

#: Windows of W7 and W8 that are added up to one point.
_WINDOWS: Final = 5
_WINDOW_S: Final = 0.1
_BEFORE_S: Final = 2.0


def draw(figures: Figures, path: Path) -> None:
    """Draw the inserts of each system, and the inserts of each region while A is lost."""
    with axes(path, 1, 3, (15, 4.2)) as (left, middle, right):
        rows = {name: row for name, row in figures.get("W11", {}).items() if isinstance(row, dict)}
        for offset, key, color in ((-0.2, "far", BLUE), (0.2, "control", GREY)):
            heights = [row[key]["p50_ms"] for row in rows.values()]
            left.bar([i + offset for i in range(len(rows))], heights, 0.4, color=color, label=key)
        left.set_xticks(range(len(rows)), list(rows))
        left.set(ylabel="ms, insert p50, client and leader in A")
        for axis, name in ((middle, "W7"), (right, "W8")):
            _draw_windows(axis, figures.get(name))
        for axis in (left, middle, right):
            if axis.get_legend_handles_labels()[0]:
                axis.legend()


def _draw_windows(axis: Any, row: Figures | None) -> None:
    if row is None:
        return
    for region, color in (("A", RED), ("B", BLUE), ("C", OCHRE)):
        counts = row["windows"][region]["acks"]
        width = _WINDOWS * _WINDOW_S
        points = [
            sum(counts[index : index + _WINDOWS]) / width
            for index in range(0, len(counts) - _WINDOWS, _WINDOWS)
        ]
        times = [index * width - _BEFORE_S for index in range(len(points))]
        axis.plot(times, points, color=color, label=f"writer in {region}")
    axis.set(xlabel=f"s after: {row['fault']}", ylabel="inserts/s", ylim=(0, None))
