"""Fixtures of the storage tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.shard.logs import reopen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shard.storage.segment_store import SegmentStore


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., SegmentStore]]:
    """Open stores in separate directories, and close them at the end."""
    stores: list[SegmentStore] = []

    def start(name: str = "segments", **options: Any) -> SegmentStore:
        stores.append(reopen(tmp_path / name, **options))
        return stores[-1]

    yield start
    for store in stores:
        store.close()
