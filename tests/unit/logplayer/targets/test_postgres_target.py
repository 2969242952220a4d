"""Targets in PostgreSQL without psycopg."""

from __future__ import annotations

import sys

import pytest

from logplayer import targets


def test_missing_driver_is_reported_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "logplayer.targets.postgres_target", raising=False)
    monkeypatch.delattr(targets, "postgres_target", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ziplog\[postgres\]'"):
        targets.postgres("warehouse", "host=x")
