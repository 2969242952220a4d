"""Lines of a process's log: one format for events, libraries and unhandled exceptions."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.logged_events import captured_events
from ziplog.runtime.connection_log import ConnectionLog

PROGRAM = """
import logging, threading, warnings
from ziplog import event_log
from ziplog.config_tables import LogConfig
from ziplog.runtime.process_logging import configure
configure("shard-0-0", LogConfig(level={level!r}, format={form!r}))
event_log.info("ready", port=7)
logging.getLogger("library").warning("slow: %s", "disk")
logging.getLogger("library").info("chatter")
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(); thread.join()
raise ValueError("two\\nlines")
"""


def lines_of(level: str, form: str) -> list[str]:
    program = PROGRAM.format(level=level, form=form)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_every_line_has_time_level_node_and_event() -> None:
    lines = lines_of("info", "logfmt")
    assert len(lines) == 5
    for line in lines:
        assert line.startswith("timestamp=20")
        assert "Z level=" in line
        assert " node=shard-0-0 event=" in line
    assert "event=ready port=7" in lines[0]
    assert 'level=warning node=shard-0-0 event="slow: disk" logger=library' in lines[1]
    assert "UserWarning: old" in lines[2]
    assert 'event="unhandled exception" reason="ZeroDivisionError' in lines[3]
    assert r'level=critical node=shard-0-0 event="unhandled exception"' in lines[4]
    assert r"ValueError: two\nlines" in lines[4]


def test_json_has_the_same_fields() -> None:
    events = [json.loads(line) for line in lines_of("info", "json")]
    assert [list(event)[:4] for event in events] == [["timestamp", "level", "node", "event"]] * 5
    assert [event["level"] for event in events] == [
        "info", "warning", "warning", "critical", "critical",
    ]  # fmt: skip
    assert events[0]["port"] == 7
    assert events[4]["reason"] == "ValueError: two\nlines"


@pytest.mark.parametrize(("level", "count"), [("debug", 5), ("warning", 4), ("error", 2)])
def test_the_level_selects_lines_of_libraries_too(level: str, count: int) -> None:
    assert len(lines_of(level, "logfmt")) == count


def test_a_change_of_a_connection_is_logged_once() -> None:
    changes = ConnectionLog()
    with captured_events() as lines:
        for problem in ("", "", "reset", "reset", "refused", ""):
            changes[b"shard-0-1"] = problem
        changes[b"mms-0"] = "reset"
    assert changes == {b"shard-0-1": "", b"mms-0": "reset"}
    assert {line["log_level"] for line in lines} == {"debug"}
    assert [(line["event"], line["peer"], line.get("reason")) for line in lines] == [
        ("peer connected", "shard-0-1", None),
        ("peer disconnected", "shard-0-1", "reset"),
        ("peer disconnected", "shard-0-1", "refused"),
        ("peer connected", "shard-0-1", None),
        ("peer disconnected", "mms-0", "reset"),
    ]
