"""Tests of the client: each insert is sent at once, in a unit of its own, unless they group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ziplog.client.inserts import sending

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package", autouse=True)
def _no_groups() -> Iterator[None]:
    """Let no single insert wait for others; `test_client_groups` is about those."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "IMMEDIATE_SINGLE_UNITS", 1 << 30)
        patch.setattr(sending, "MAX_SINGLE_UNITS", 1 << 30)
        yield
