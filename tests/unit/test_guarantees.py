"""docs/guarantees.md: every test that a promise names exists, and every promise names one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")


@cache
def functions_of(file: str) -> set[str]:
    """Return the names of a module's functions."""
    module = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in module.body if isinstance(node, ast.FunctionDef)}


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE)
    assert named
    for file, name in named:
        assert name in functions_of(file), f"{file} has no {name}"


def test_every_promise_names_its_test() -> None:
    promised = PAGE.partition("## What is not guaranteed")[0]
    for promise in re.split(r"^\* ", promised, flags=re.MULTILINE)[1:]:
        assert "`tests/" in promise, promise
