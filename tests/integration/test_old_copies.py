"""A server's data directory is replaced by an older copy of itself, between two clean stops."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Literal

import pytest

from tests.waiting import wait_until
from ziplog.local import Cluster

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("durability", ["memory", "disk"])
@pytest.mark.parametrize("server", [0, 1])
def test_a_server_with_an_old_copy_copies_the_log_of_another_server(
    tmp_path: Path, server: int, durability: Literal["memory", "disk"]
) -> None:
    folder, name = tmp_path / "log", f"shard-0-{server}"
    payloads: list[bytes] = []

    def insert(count: int, **options: object) -> None:
        with Cluster(folder, shards=1, **options) as running, running.connect() as log:  # type: ignore[arg-type]
            for _ in range(count):
                payloads.append(b"record %d" % len(payloads))
                log.insert_after(payloads[-1])
            assert [record.payload for record in log.subscribe(follow=False)] == payloads

    insert(5, durability=durability)
    shutil.copytree(folder / name, tmp_path / "copy")
    insert(50)
    shutil.rmtree(folder / name)
    shutil.copytree(tmp_path / "copy", folder / name)
    with Cluster(folder) as running, running.connect(timeout=60.0) as log:
        for number in range(3):
            payloads.append(b"after %d" % number)
            log.insert_after(payloads[-1])
        assert [record.payload for record in log.subscribe(follow=False)] == payloads
        wait_until(lambda: log.cluster()["shards"][0]["state"] == "live", "the shard is recovered")
        assert log.cluster()["shards"][0]["view"] == 2
        assert log.cluster()["losses"] == []
    insert(2)
