"""`ziplog.aio` and `logdb.aio` have the names and the arguments of `ziplog` and `logdb`."""

from __future__ import annotations

import inspect

import pytest

import logdb
import logdb.aio
import ziplog
import ziplog.aio


def methods(kind: type) -> dict[str, list[str]]:
    """Return the parameters of each public method of a class; of other attributes none."""
    found = {}
    for name in dir(kind):
        if not name.startswith("_"):
            member = getattr(kind, name)
            found[name] = list(inspect.signature(member).parameters) if callable(member) else []
    return found


@pytest.mark.parametrize(
    ("blocking", "asynchronous"),
    [
        *[
            (getattr(ziplog, name), getattr(ziplog.aio, name, None))
            for name in ("Cursor", "Log", "Scan", "Speculation", "Subscription")
        ],
        *[
            (getattr(logdb, name), getattr(logdb.aio, name, None))
            for name in ("Database", "Snapshot", "Transaction", "Watch")
        ],
    ],
)
def test_a_class_has_the_same_name_and_methods_for_asyncio(
    blocking: type, asynchronous: type | None
) -> None:
    assert asynchronous is not None, f"no class for asyncio is named {blocking.__name__}"
    assert methods(blocking) == methods(asynchronous)
