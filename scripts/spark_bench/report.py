"""Bulk read and write benchmarks by name, their tables, and the picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from spark_bench import reading, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Figures = dict[str, Any]

_READING: Final = "spark"
_LAYERS: Final = "spark-layers"
_WRITING: Final = "spark-write"


def _measure_layers(scale: float) -> Figures:
    from spark_bench import layers  # noqa: PLC0415 - imports pyspark

    return layers.measure(scale)


def _layers(result: Figures) -> Iterator[str]:
    from spark_bench import layers  # noqa: PLC0415 - as above

    return layers.lines(result)


#: By name: what measures, of a scale.
KINDS: Final[dict[str, Callable[[float], Figures]]] = {
    _READING: reading.measure,
    _LAYERS: _measure_layers,
    _WRITING: writing.measure,
}
TABLES: Final[dict[str, Callable[[Figures], Iterator[str]]]] = {
    _READING: reading.lines,
    _LAYERS: _layers,
    _WRITING: writing.lines,
}


def draw(results: Figures, path: Path) -> None:
    """Draw how reading from the log compares, if that was measured."""
    if _READING in results:
        reading.draw(results[_READING], path)
