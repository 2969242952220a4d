"""Tests that a page or a table names as `tests/FILE.py::test_NAME`."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]


@cache
def functions_of(file: str) -> set[str]:
    """Return the names of a module's functions."""
    module = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in module.body if isinstance(node, ast.FunctionDef)}


def check_exists(file: str, name: str) -> None:
    """Assert that a module has a test."""
    assert name in functions_of(file), f"{file} has no {name}"
