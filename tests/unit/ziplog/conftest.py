"""Fixtures for tests of a consensus node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.ziplog.bench import Bench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(held: list[tuple[bytes, int, int]] | None = None, **more: Any) -> Bench:
        directory = tmp_path / str(len(benches))
        benches.append(Bench(more.pop("directory", directory), held or [], **more))
        return benches[-1]

    yield make
    for one in benches:
        one.close()
