"""A pytest fixture with a real cluster, for tests of programs that use Ziplog.

    def test_my_program(ziplog_cluster):
        with ziplog_cluster.connect() as log:
            log.insert_after(b"x")

pytest discovers it where the package is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ziplog.local import Cluster


@pytest.fixture
def ziplog_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of 2 shards x 2 replicas on loopback, stopped at the end of the test."""
    # Imported on use: pytest loads this module in every run, also without clusters.
    from ziplog.local import Cluster  # noqa: PLC0415

    with Cluster(tmp_path / "ziplog") as cluster:
        yield cluster
