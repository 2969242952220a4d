"""Fixtures that these tests share with unit tests."""

from tests.unit.shard.archive.conftest import segments, started

__all__ = ["segments", "started"]
