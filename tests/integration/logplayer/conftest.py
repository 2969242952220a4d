"""A cluster of real processes, and players of it in this process and in others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    import ziplog


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("players") / "log", shards=2) as running:
        yield running


@pytest.fixture
def log(cluster: Cluster) -> Iterator[ziplog.Log]:
    with cluster.connect(timeout=60.0) as client:
        yield client
