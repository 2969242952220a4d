"""What a terminal may act on is escaped in all output, also in JSON, which stays the same."""

from __future__ import annotations

import json
import os

import pytest

from tests.unit.ziplog.cli.fakes import STATUS, FakeLog, run, shard
from ziplog.cli.terminal import json_line

#: JSON may have these as they are; a terminal acts on them.
CONTROLS = "\x7f\x9b\u202e\u2028"


@pytest.mark.parametrize("command", [("status",), ("node", "list"), ("shard", "list"), ("check",)])
def test_json_of_the_status_document_holds_no_control_character(
    command: tuple[str, ...], log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = shard(0, state=f"state {CONTROLS}")
    named["replicas"][0] |= {"name": f"shard-0-0 {CONTROLS}", "version": CONTROLS}
    monkeypatch.setattr(log, "cluster", lambda: {**STATUS, "shards": [named]})
    printed = run(*command, "--json").stdout
    assert not set(CONTROLS) & set(printed)
    assert CONTROLS in "".join(map(_texts, map(json.loads, printed.split("\n")[:-1])))


def _texts(document: object) -> str:
    """Return all texts of a document, one after the other."""
    if isinstance(document, dict):
        return "".join(map(_texts, document.values()))
    if isinstance(document, list):
        return "".join(map(_texts, document))
    return document if isinstance(document, str) else ""


def test_json_has_text_in_place_of_bytes_that_are_no_utf8() -> None:
    name = os.fsdecode(b"/data/\xff\xfe.parquet")
    line = json_line({"file": name, name: [name, 5, None], "other": "\u20ac"})
    shown = "/data/\\udcff\\udcfe.parquet"
    line.encode()
    assert json.loads(line) == {"file": shown, shown: [shown, 5, None], "other": "\u20ac"}
