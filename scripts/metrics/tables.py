"""Figures as lines of text: a figure a line, and rows with the same figures as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

Row = dict[str, Any]

#: A wider table has a line for each figure, instead of one for each row, if that is narrower.
_WIDTH: Final = 100
#: Figures that only pictures show.
_DRAWN: Final = "windows"


def lines(name: str, figures: Row, indent: str = "") -> Iterator[str]:
    """Yield figures under their name, without those that only pictures show."""
    yield f"{indent}{name}"
    deeper = indent + "  "
    if _are_rows(list(figures.values())):
        yield from _table(dict(figures), deeper)
        return
    for key, value in figures.items():
        if key == _DRAWN:
            continue
        if isinstance(value, dict):
            yield from lines(key, value, deeper)
        elif not isinstance(value, list):
            yield f"{deeper}{key:<18} {_cell(value)}"
        elif _are_rows(value):
            yield f"{deeper}{key}"
            yield from _table({str(number): row for number, row in enumerate(value, 1)}, deeper)


def _are_rows(values: list[Any]) -> bool:
    """Whether values are rows with the same figures."""
    return (
        bool(values)
        and all(isinstance(value, dict) for value in values)
        and len({tuple(value) for value in values}) == 1
    )


def _table(rows: dict[str, Row], indent: str) -> Iterator[str]:
    flat = {name: dict(_flat(row)) for name, row in rows.items()}
    heads = list(dict.fromkeys(head for row in flat.values() for head in row))
    grid = [["", *heads]]
    grid += [[name, *(_cell(row.get(head)) for head in heads)] for name, row in flat.items()]
    if _width(grid) > _WIDTH:
        grid = min(grid, [list(column) for column in zip(*grid, strict=True)], key=_width)
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    for first, *others in grid:
        cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        yield f"{indent}{first:<{widths[0]}}  {'  '.join(cells)}"


def _width(grid: list[list[str]]) -> int:
    return sum(2 + max(map(len, column)) for column in zip(*grid, strict=True))


def _flat(row: Row, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a row's figures, those of its parts by the names of both."""
    for key, value in row.items():
        if isinstance(value, dict) and key != _DRAWN:
            yield from _flat(value, f"{prefix}{key} ")
        elif not isinstance(value, dict | list):
            yield f"{prefix}{key}", value


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.3f}" if isinstance(value, float) else str(value)
