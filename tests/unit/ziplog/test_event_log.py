"""Log events: their lines, and how a program that embeds our code gets them."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from tests.logged_events import captured_events
from ziplog import event_log


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        (None, ""),
        (True, "true"),
        (False, "false"),
        ("", ""),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ('say "x"', r'"say \"x\""'),
        ("one\ntwo", r"one\ntwo"),
        (r"C:\d", r"C:\d"),
        (r"C:\d e", r'"C:\\d e"'),
        (b"raw", "b'raw'"),
        ("größe", "größe"),
    ],
)
def test_the_value_of_a_field(value: object, text: str) -> None:
    assert event_log.logfmt({"field": value, "next": 1}) == f"field={text} next=1"


def test_a_program_gets_each_event_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=event_log.LOGGER):
        event_log.info("ready", endpoint="h:1", limbo=False)
        event_log.debug("peer connected", peer="mms-0")
    [record] = caplog.records
    assert record.name == "ziplog.events"
    assert record.getMessage() == "ready endpoint=h:1 limbo=false"
    assert record.funcName == "test_a_program_gets_each_event_with_its_fields"


def test_a_failure_has_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("x")
    try:
        raise error
    except ValueError:
        event_log.exception("target failed", task="t")
    event_log.critical("unhandled exception", exc_info=(ValueError, error, None))
    found = [
        (record.levelname, record.exc_info and record.exc_info[1]) for record in caplog.records
    ]
    assert found == [("ERROR", error), ("CRITICAL", error)]


def test_each_function_has_its_level() -> None:
    names = ("debug", "info", "warning", "error", "exception", "critical")
    with captured_events() as events:
        for name in names:
            getattr(event_log, name)("happened", by=name)
    levels = {str(event["by"]): event["log_level"] for event in events}
    assert levels == {name: name for name in names} | {"exception": "error"}


def test_a_node_imports_no_package_for_terminals() -> None:
    program = (
        "import sys, failure_handler.__main__, mms.__main__\n"
        "import shard.__main__, shard.archive.__main__\n"
        "print(*sorted({'rich', 'typer', 'click', 'pygments', 'structlog'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.split() == []
