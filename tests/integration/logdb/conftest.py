"""Fixtures that integration tests share with unit tests."""

from tests.unit.logdb.conftest import cluster, coordinator, log

__all__ = ["cluster", "coordinator", "log"]
