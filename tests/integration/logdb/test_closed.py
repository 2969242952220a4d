"""A database that was closed refuses every call, and says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import logdb
import ziplog

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_closed_database_refuses_all_calls(coordinator: logdb.Coordinator) -> None:
    db = logdb.connect(coordinator.endpoint)
    open_one = db.transaction()
    open_one.put("unsent", 1)
    db.close()
    calls: list[Callable[[], object]] = [
        db.transaction, db.scan, db.snapshot, db.status, db.__enter__, open_one.commit,
        lambda: db.run(lambda _: None), lambda: db.watch("k"), lambda: db.multi_get([]),
        lambda: db.multi_put({}), lambda: db.test_and_multi_put({}, {}),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ziplog.ClosedError):
            call()
    assert open_one.status == "open", "the commit was not sent, so its outcome is certain"


def test_an_error_of_a_function_that_closed_its_database(coordinator: logdb.Coordinator) -> None:
    db = logdb.connect(coordinator.endpoint)

    def close(_: object) -> None:
        db.close()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        db.run(close)
