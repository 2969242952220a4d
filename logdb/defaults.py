"""The default address of coordinators: `LOGDB_COORDINATOR`, else 127.0.0.1:7500."""

from __future__ import annotations

import os
from typing import Final

#: The environment variable: "host:port", several separated by commas.
VARIABLE: Final = "LOGDB_COORDINATOR"
PORT: Final = 7500
COORDINATOR: Final = f"127.0.0.1:{PORT}"


def coordinators() -> str:
    """Return the default coordinators."""
    return os.environ.get(VARIABLE) or COORDINATOR
