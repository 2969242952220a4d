"""Processes beside a cluster: one that dies is started again, also after a shortage."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from tests.waiting import wait_until
from ziplog.deploy import companion
from ziplog.deploy.companion import Companion
from ziplog.deploy.node_logs import LOG_DIRECTORY

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    import pytest

PROGRAM = "import signal; print('ready', flush=True); signal.pause()"


def test_a_companion_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / LOG_DIRECTORY).mkdir()
    spawn, refused = companion.spawn, list[str]()

    def refuse_once(*arguments: Any) -> subprocess.Popen[bytes]:
        if not refused:
            refused.append("once")
            raise OSError(24, "Too many open files")
        return spawn(*arguments)

    monkeypatch.setattr(companion, "_MIN_PAUSE_S", 0.01)
    with Companion(tmp_path, "one", "the one", [sys.executable, "-c", PROGRAM], 40.0) as one:
        former = one._process
        monkeypatch.setattr(companion, "spawn", refuse_once)
        former.kill()
        wait_until(lambda: one._process is not former, "it is started again")
        assert refused
        assert one._process.poll() is None


def test_a_companion_that_is_not_ready_in_time_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For example a coordinator, which waits for the records of a shard without servers."""
    (tmp_path / LOG_DIRECTORY).mkdir()
    go = tmp_path / "go"
    os.mkfifo(go)
    program = (
        f"import signal, sys; open({str(go)!r}).read(); print('ready', flush=True);"
        " print('it goes on', file=sys.stderr, flush=True); signal.pause()"
    )
    with Companion(tmp_path, "one", "the one", [sys.executable, "-c", program], 0.1) as one:
        assert "the one is not ready after 0 s, and goes on" in caplog.text
        go.write_text("go")
        log = tmp_path / LOG_DIRECTORY / "one.log"
        wait_until(lambda: log.read_text() == "it goes on\n", "it prints its line")
        assert one._process.poll() is None
