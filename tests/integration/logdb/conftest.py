"""A log of real processes and a coordinator in this process, new for each module that uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import logdb
from ziplog.local import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    import ziplog


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster") / "log", shards=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def log(cluster: Cluster) -> Iterator[ziplog.Log]:
    with cluster.connect() as log:
        yield log


@pytest.fixture(scope="module")
def coordinator(log: ziplog.Log) -> Iterator[logdb.Coordinator]:
    with logdb.Coordinator(log) as coordinator:
        yield coordinator
