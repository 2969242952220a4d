"""The version of this release."""

from __future__ import annotations

import functools
from typing import Final

#: The version of the files in a node's directory. Another one: releases with this one cannot read
#: the directory.
FILES: Final = 1


@functools.cache
def version() -> str:
    """Return the version of the installed package "ziplog"."""
    from importlib import metadata  # noqa: PLC0415 - slow to import

    return metadata.version("ziplog")
