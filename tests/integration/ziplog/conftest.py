"""Fixtures that integration tests share with unit tests."""

from tests.unit.ziplog.conftest import bench

__all__ = ["bench"]
