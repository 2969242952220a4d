"""The command line with a log in memory."""

from __future__ import annotations

import pytest

import ziplog
from tests.unit.ziplog.cli.fakes import FakeLog
from ziplog.defaults import VARIABLE


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> FakeLog:
    monkeypatch.delenv(VARIABLE, raising=False)
    fake = FakeLog()

    def connect(bootstrap: str, *, timeout: float, region: str | None = None) -> FakeLog:
        fake.calls.append(("connect", bootstrap, timeout))
        return fake

    monkeypatch.setattr(ziplog, "connect", connect)
    return fake
