"""`ziplog up`: the warnings that it prints."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.unit.ziplog.test_regions import TRIANGLE, config
from ziplog.cli import servers
from ziplog.config_text import dump

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

    from ziplog.config import ClusterConfig


def reported(
    file: ClusterConfig,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[str]:
    """Return the warnings of the start of a cluster with this file."""

    @contextlib.contextmanager
    def cluster(_directory: Path, **_options: Any) -> Iterator[Any]:
        yield type("Started", (), {"config": file})

    monkeypatch.setattr(servers, "Cluster", cluster)
    with contextlib.ExitStack() as stack:
        servers._start(stack, directory, 1.0, {}, None)
    lines = capsys.readouterr().err.splitlines()
    mark = "ziplog: warning: "
    return [line.removeprefix(mark) for line in lines if line.startswith(mark)]


def test_a_cluster_that_survives_the_loss_of_each_region_has_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(TRIANGLE, rtt_ms=120)
    assert reported(file, tmp_path, monkeypatch, capsys) == []


def test_each_reason_why_a_region_must_not_be_lost_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config({0: ("a", "b"), 1: ("b", "a")})
    file = replace(file, mms=tuple(replace(node, region="a") for node in file.mms))
    majority = "are left, no majority: no lease is granted"
    assert reported(file, tmp_path, monkeypatch, capsys) == [
        f"if a is lost: 0 of 3 nodes of the membership service {majority}",
        "if a is lost: every shard has a server in a: no shard takes records",
        "if b is lost: every shard has a server in b: no shard takes records",
    ]


def test_epochs_of_a_millisecond_over_a_wan_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(TRIANGLE, rtt_ms=40, epoch_ms=1)
    [warning] = reported(file, tmp_path, monkeypatch, capsys)
    assert warning.startswith("epoch_ms is 1 and rtt_ms is 40: ")


def test_a_start_in_the_background_does_not_repeat_that_another_one_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.toml").write_text(dump(config({0: ("a", "b")})))

    def spawn(*_: Any, stderr: io.BufferedWriter, **_options: Any) -> Any:
        stderr.write(b'level=critical event="not started" reason="in use by process 7"\n')
        stderr.write(b'level=warning event="settings wait for a restart"\n')
        stderr.flush()
        return type("Process", (), {"pid": 7, "stdout": io.BytesIO(b"127.0.0.1:1\n")})

    monkeypatch.setattr(servers.subprocess, "Popen", spawn)
    monkeypatch.setattr(servers, "_warn_of_full_disks", lambda _: None)
    servers._detach(tmp_path, {}, 1.0, [], json=False)
    lines = capsys.readouterr().err.splitlines()
    found = [line for line in lines if line.startswith("ziplog: warning: ")]
    assert found == ["ziplog: warning: settings wait for a restart"]


def test_a_log_line_that_stderr_does_not_take_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("ziplog.test_of_stderr")
    monkeypatch.setattr(logger, "handlers", [servers._LogToStderr()])
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8", buffering=1) as broken:
        monkeypatch.setattr(sys, "stderr", broken)
        logger.warning("shard-0-0 ended (signal 9)")
        # Its buffer still holds the line, which nothing can write.
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
