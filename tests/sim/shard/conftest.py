"""Fixtures that these tests share with unit tests."""

from tests.unit.shard.conftest import opened

__all__ = ["opened"]
