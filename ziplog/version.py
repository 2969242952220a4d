"""The version of this release."""

from __future__ import annotations

import functools


@functools.cache
def version() -> str:
    """Return the version of the installed package "ziplog"."""
    from importlib import metadata  # noqa: PLC0415 - slow to import

    return metadata.version("ziplog")
