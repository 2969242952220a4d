"""Tables of settings and options in the pages are complete; commands in the pages exist."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, Final

import pytest
import typer.main

from logdb.__main__ import _parser
from spark_reader import options, write_options
from tests.named_tests import ROOT
from ziplog.cli import app
from ziplog.config import ClusterConfig, NodeConfig
from ziplog.config_keys import keys_of
from ziplog.config_tables import LimitsConfig, LogConfig, MonitorConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Each table of a cluster file, and the page that lists its keys.
TABLES: Final = (
    ("`[cluster]`", ClusterConfig, "operating.md"),
    ("`[limits]`", LimitsConfig, "operating.md"),
    ("`[log]`", LogConfig, "operating.md"),
    ("`[monitor]`", MonitorConfig, "monitoring.md"),
    ("a node", NodeConfig, "operating.md"),
)
OPTION: Final = r"--[a-z-]+"


def rows(page: str, before: str) -> list[tuple[str, str, str]]:
    """Return the rows of the first table from a text of a page on; it has three columns."""
    page_text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    table = re.search(r"(^\|.*\n)+", page_text[page_text.index(before) :], re.MULTILINE)
    assert table, before
    cells = (re.split(r"(?<!\\)\|", line)[1:-1] for line in table[0].splitlines()[2:])
    return [(name.strip(), second.strip(), third.strip()) for name, second, third in cells]


def shown(value: object) -> str:
    """Return a default as the pages write it, without marks."""
    if value is dataclasses.MISSING:
        return "required"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def unmarked(text: str) -> str:
    return re.sub(r'[`",]', "", text)


def by_option(found: list[tuple[str, str, str]]) -> dict[str, str]:
    """Return the default of each option; a row may have several of both."""
    listed: dict[str, str] = {}
    for first, second, _ in found:
        names = re.findall(OPTION, first)
        defaults = second.split(", ") if len(names) > 1 else [second]
        listed |= zip(names, map(unmarked, defaults), strict=True)
    return listed


@pytest.mark.parametrize(("name", "table", "page"), TABLES)
def test_pages_list_all_keys_with_their_defaults(name: str, table: type, page: str) -> None:
    found = rows(page, f"| key of {name} | default |")
    listed = {unmarked(key): unmarked(default) for key, default, _ in found}
    listed.pop("data_dir", None)  # A path, which the loader completes.
    assert listed == {key: shown(default) for key, (_, default) in keys_of(table).items()}


def test_page_lists_all_options_of_up() -> None:
    command: Any = typer.main.get_command(app)
    expected = {}
    for option in [one for one in command.get_command(None, "up").params if not one.hidden]:
        in_help = re.search(r"\[default: (\w+)\]", option.help or "")
        default = in_help[1] if in_help else shown(option.default).replace("false", "off")
        expected[option.opts[0]] = "required" if option.required else default
    assert by_option(rows("operating.md", "## 1. Start and stop")) == expected


def test_page_lists_all_options_of_a_coordinator() -> None:
    listed = by_option(rows("logdb.md", "## 15. Coordinators"))
    for action in _parser()._actions[1:]:
        default = listed.pop(action.option_strings[0])
        if type(action.default) in {int, float}:
            assert default == shown(action.default)
    assert not listed


@pytest.mark.parametrize(
    ("section", "names"),
    [("### 1.1 Options", options.NAMES), ("## 3. Writing", write_options._NAMES)],
)
def test_page_lists_all_options_of_spark(section: str, names: tuple[str, ...]) -> None:
    listed = [name for first, _, _ in rows("spark.md", section) for name in first.split(", ")]
    assert sorted(map(unmarked, listed)) == sorted(names)


def commands(page: Path) -> Iterator[str]:
    """Yield the commands `ziplog ...` in a page's text and blocks of code, without comments."""
    text = page.read_text(encoding="utf-8")
    yield from re.findall(r"`ziplog ([^`]+)`", text)
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from re.findall(r"^(?:[^#\n]*\| )?ziplog ([^#\n]+)", block, re.MULTILINE)


def test_commands_of_pages_exist_with_their_options() -> None:
    ziplog: Any = typer.main.get_command(app)
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found = [text for page in pages for text in commands(page)]
    assert len(found) > 200
    for text in found:
        verbs, words = [ziplog], text.split()
        while hasattr(verbs[0], "get_command") and words and not words[0].startswith("-"):
            verbs = [verbs[0].get_command(None, verb) for verb in words.pop(0).split("|")]
            assert all(verbs), text
        known = {option for parameter in verbs[0].params for option in parameter.opts}
        assert set(re.findall(rf"(?<!\S){OPTION}", " ".join(words))) <= known | {"--help"}, text
