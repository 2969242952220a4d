"""Fixtures that the integration tests of this folder share, some of them with unit tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.ziplog.conftest import bench
from ziplog.runtime.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["bench"]


@pytest.fixture
def opened() -> Iterator[Callable[..., Transport]]:
    transports: list[Transport] = []

    def start(bind: str | None = None) -> Transport:
        transports.append(Transport(bind))
        return transports[-1]

    yield start
    for transport in transports:
        transport.close()
