"""The events of the processes' logs are those that docs/operating.md lists, with their fields.

A program that reads the logs may rely on these names. Warnings with values in their text are
sentences for operators, and not listed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("ziplog", "shard", "mms", "failure_handler", "logdb", "logplayer")
LEVELS: Final = {"debug", "info", "warning", "error", "critical", "exception"}
#: Fields of the logging library.
BUILT_IN: Final = {"exc_info"}
ROW: Final = re.compile(r"^\| `([^`]+)` \| (.+?) \| (.*?) \|$", re.MULTILINE)


def calls(tree: ast.AST) -> Iterator[tuple[str, str, set[str]]]:
    """Yield (event, level, fields) of each call of a logger with a constant event."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        event, function = node.args[0], node.func
        if not isinstance(event, ast.Constant) or not isinstance(function, ast.Attribute):
            continue
        is_rare = function.attr == "_warn_rarely"
        is_logger = function.attr in LEVELS and "log" in ast.unparse(function.value)
        if (is_rare or is_logger) and "%" not in str(event.value):
            fields = {word.arg for word in node.keywords if word.arg} - BUILT_IN
            level = "warning" if is_rare else function.attr
            yield str(event.value), "error" if level == "exception" else level, fields


def logged() -> dict[str, tuple[set[str], set[str]]]:
    """Return the levels and fields of all events in the product's code."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for event, level, fields in calls(ast.parse(path.read_text(encoding="utf-8"))):
                levels, all_fields = found.setdefault(event, (set(), set()))
                levels.add(level)
                all_fields |= fields
    return found


def documented() -> dict[str, tuple[set[str], set[str]]]:
    """Return the same of the table in docs/operating.md."""
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    table = text.partition("| event | level | fields |")[2].partition("\n\n")[0]
    return {
        event: (set(levels.split(", ")), set(re.findall(r"`([^`]+)`", fields)))
        for event, levels, fields in ROW.findall(table)
    }


def test_the_documents_list_the_events_with_their_levels_and_fields() -> None:
    assert documented() == logged()


def test_a_call_is_found_with_its_fields() -> None:
    tree = ast.parse('self._log.warning("disk full", free_bytes=1, exc_info=True)\nlog("x")')
    assert list(calls(tree)) == [("disk full", "warning", {"free_bytes"})]
