"""Completion: the scripts, verbs, and names that a cluster or its file has."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import ziplog
from tests.unit.ziplog.cli.fakes import FakeLog, cluster_file, run
from ziplog.cli import completion
from ziplog.errors import UnavailableError

if TYPE_CHECKING:
    from pathlib import Path


def completed(monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    """Return what a shell gets for a line whose last word is incomplete."""
    monkeypatch.setenv("_ZIPLOG_COMPLETE", "complete_bash")
    completion.enable()
    words = line.split(" ")
    typed = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return run(env=typed).stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_a_shell_is_printed(shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert "_ZIPLOG_COMPLETE" in result.stdout


def test_a_shell_gets_the_verbs_that_complete_a_word() -> None:
    environment = os.environ | {
        "_ZIPLOG_COMPLETE": "complete_bash", "COMP_WORDS": "ziplog sta", "COMP_CWORD": "1",
    }  # fmt: skip
    program = "import sys; sys.argv[0] = 'ziplog'; from ziplog.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env=environment,
    )  # fmt: skip
    assert ended.stdout.split() == ["status"]


def test_nodes_and_shards_come_from_the_cluster(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert completed(monkeypatch, "ziplog tail --shard ") == ["0"]
    assert completed(monkeypatch, "ziplog insert --shard 1") == []
    assert completed(monkeypatch, "ziplog shard remove ") == ["0"]
    assert completed(monkeypatch, "ziplog node log-level shard-") == ["shard-0-0"]
    assert completed(monkeypatch, "ziplog tail --bootstrap h:1 --shard ") == ["0"]
    assert [call for call in log.calls if call[0] == "connect"][-1] == ("connect", "h:1", 0.5)


def test_nodes_come_from_the_cluster_file_on_the_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = cluster_file(tmp_path, 3)
    assert completed(monkeypatch, f"ziplog node run --config {file} --node m") == ["mms-0"]
    line = f"ziplog restart --rolling --data-dir {tmp_path} --node shard-"
    assert completed(monkeypatch, line) == ["shard-0-0"]


def test_nothing_completes_without_a_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UnavailableError("no cluster")

    monkeypatch.setattr(ziplog, "connect", refuse)
    assert completed(monkeypatch, "ziplog tail --shard ") == []
    assert completed(monkeypatch, f"ziplog node run --config {tmp_path} --node ") == []
