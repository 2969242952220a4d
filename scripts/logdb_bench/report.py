"""The measurements of LogDB by name, their tables, and the picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logdb_bench import contention, cpu, restart, ycsb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Figures = dict[str, Any]

_CONTENTION: Final = "logdb-contention"
#: By name: what measures, of a scale and a number of shards.
KINDS: Final[dict[str, Callable[[float, int], Figures]]] = {
    _CONTENTION: contention.measure,
    "logdb-ycsb": ycsb.measure,
    "logdb-restart": restart.measure,
    "logdb-cpu": lambda scale, _: cpu.measure(scale),
}
TABLES: Final[dict[str, Callable[[Figures], Iterator[str]]]] = {
    _CONTENTION: contention.tables,
    "logdb-ycsb": ycsb.tables,
    "logdb-restart": restart.tables,
    "logdb-cpu": cpu.tables,
}


def draw(results: Figures, path: Path) -> None:
    """Draw the thesis' Fig. 4.8 and 4.9, if these were measured."""
    import matplotlib as mpl  # noqa: PLC0415  optional

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  optional

    if _CONTENTION not in results:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6))
    contention.draw(results[_CONTENTION], left, right)
    figure.tight_layout()
    figure.savefig(path)
