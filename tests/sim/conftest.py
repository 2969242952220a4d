"""Fixtures: a simulated disk, and a module that uses it instead of the real one."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests.sim.disks import fresh_module
from tests.simulator.disk import Disk, installed

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def module() -> Iterator[Any]:
    """Return a module with simulated versions of the names that production modules use."""
    module = fresh_module()
    with installed([module], Random(5)):
        yield module


@pytest.fixture
def disk() -> Disk:
    """Return an empty disk."""
    return Disk(Random(1))
