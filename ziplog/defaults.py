"""The default address of a cluster: `ZIPLOG_BOOTSTRAP`, else 127.0.0.1:7400."""

from __future__ import annotations

import os
from typing import Final

#: The environment variable: "host:port", several separated by commas.
VARIABLE: Final = "ZIPLOG_BOOTSTRAP"
BOOTSTRAP: Final = "127.0.0.1:7400"


def bootstrap() -> str:
    """Return the default nodes of the membership service."""
    return os.environ.get(VARIABLE) or BOOTSTRAP
