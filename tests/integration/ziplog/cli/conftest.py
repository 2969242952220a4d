"""Fixtures that these tests share with unit tests."""

from tests.unit.ziplog.cli.conftest import log

__all__ = ["log"]
