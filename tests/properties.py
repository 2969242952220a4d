"""How many examples and seeds a test gets: few in `make check`, more at night."""

from __future__ import annotations

import os
from typing import Any, Final

import pytest
from hypothesis import settings

#: Examples, in percent of what a test asks for.
PERCENT: Final = int(os.environ.get("ZIPLOG_EXAMPLES", "30"))


def examples(count: int, **more: Any) -> settings:
    """Return the settings of a property that wants `count` examples."""
    return settings(max_examples=max(5, count * PERCENT // 100), **more)


def seeds(quick: int, total: int) -> list[Any]:
    """Return the seeds of a test, from 0: those after the first `quick` ones run at night only."""
    return [
        pytest.param(seed, marks=() if seed < quick else pytest.mark.nightly)
        for seed in range(total)
    ]
