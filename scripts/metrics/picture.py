"""Pictures of measurements, by matplotlib (optional)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLUE: Final = "#2a6f97"
OCHRE: Final = "#c58b2b"
RED: Final = "#b3413a"
GREEN: Final = "#3a8f4d"
GREY: Final = "#888888"
LIGHT_GREY: Final = "#bbbbbb"


@contextmanager
def axes(
    path: Path,
    rows: int = 1,
    columns: int = 2,
    size: tuple[float, float] = (11, 4.2),
    **options: Any,
) -> Iterator[Any]:
    """Yield the axes of a new picture (SVG or PNG), as `pyplot.subplots` does; then write it.

    Args:
        path: of the file.
        rows: of axes.
        columns: of axes.
        size: width and height in inches.
        options: further ones of `pyplot.subplots`.

    """
    import matplotlib as mpl  # noqa: PLC0415  optional

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  optional

    figure, found = plt.subplots(rows, columns, figsize=size, **options)
    yield found
    figure.tight_layout()
    figure.savefig(path)
