"""Fixtures that these tests share with those of the command line."""

from tests.unit.ziplog.cli.conftest import log

__all__ = ["log"]
