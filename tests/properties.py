"""How many examples a property gets: few in `make check`, more in `make test`, many at night."""

from __future__ import annotations

import os
from typing import Any, Final

from hypothesis import settings

#: Examples, in percent of what a test asks for.
PERCENT: Final = int(os.environ.get("ZIPLOG_EXAMPLES", "100"))


def examples(count: int, **more: Any) -> settings:
    """Return the settings of a property that wants `count` examples."""
    return settings(max_examples=max(5, count * PERCENT // 100), **more)
