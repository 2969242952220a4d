"""The end of a node's log, and its warnings."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from ziplog.deploy import node_logs

if TYPE_CHECKING:
    from pathlib import Path


def write(directory: Path, text: str) -> None:
    logs = directory / node_logs.LOG_DIRECTORY
    logs.mkdir(exist_ok=True)
    (logs / "x.log").write_text(text)


def test_the_tail_is_short(tmp_path: Path) -> None:
    assert node_logs.tail(tmp_path, "x") == "(no log)"
    write(tmp_path, "")
    assert node_logs.tail(tmp_path, "x") == "(empty log)"
    write(tmp_path, "".join(f"line {number}\n" for number in range(10_000)))
    assert node_logs.tail(tmp_path, "x") == " | ".join(f"line {n}" for n in range(9995, 10_000))
    write(tmp_path, f"reason=here state={'x' * 10_000}\n")
    assert node_logs.tail(tmp_path, "x").startswith("reason=here")
    assert len(node_logs.tail(tmp_path, "x")) < 1000
    assert len(node_logs.tail(tmp_path, "x", line_length=5000)) == 5000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("level=warning event=plain", "plain"),
        ('level=warning node=n event="a \\"quoted\\" event" free=1', 'a "quoted" event'),
        ("level=WARNING event='of a library'", "of a library"),
        ('{"level": "warning", "event": "in JSON"}', "in JSON"),
        ('{"event":"halted","level":"critical","reason":"no \\"disk\\""}', 'halted: no "disk"'),
        ("level=critical event=halted reason='no disk' state='event=x'", "halted: no disk"),
        (f"level=error event=halted reason='{'x' * 3000}' state=y", f"halted: {'x' * 3000}"),
    ],
)
def test_a_warning_is_its_event_and_its_whole_reason(
    tmp_path: Path, line: str, message: str
) -> None:
    write(tmp_path, f"level=info event=started\n{line}\nlevel=info event=stopped\n")
    assert node_logs.warnings(tmp_path, "x") == [message]


def test_a_log_of_the_size_becomes_the_first_of_the_former_ones(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert not node_logs.rotate(log, 10, 3)
    with log.open("ab", buffering=0) as process:
        for number in range(4):
            process.write(b"%d.......\n" % number)
            assert node_logs.rotate(log, 10, 3) is False
            process.write(b"more")
            assert node_logs.rotate(log, 10, 3) is True
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {"x.log": "", "x.log.1": "3.......\nmore", "x.log.2": "2.......\nmore"}
    log.write_text("y" * 10)
    node_logs.rotate(log, 10, 1)
    assert log.read_text() == ""


def test_only_the_last_distinct_warnings_of_the_present_process_are_returned(
    tmp_path: Path,
) -> None:
    former = "level=warning event=former\n"
    write(tmp_path, former + "".join(f"level=error event=e{n}\n" * 2 for n in range(5)))
    assert node_logs.warnings(tmp_path, "x", len(former)) == ["e2", "e3", "e4"]
    write(tmp_path, former)
    assert node_logs.warnings(tmp_path, "x", len(former)) == []
    assert node_logs.warnings(tmp_path, "none") == []


def test_the_last_words_are_an_error_that_is_no_event(tmp_path: Path) -> None:
    warning = "timestamp=2026 level=warning event=few\n"
    write(tmp_path, f"{warning}mms: mms-0: cannot open a port\n\n")
    assert node_logs.last_words(tmp_path, "x") == ["mms: mms-0: cannot open a port"]
    for text in (warning, '{"level": "warning", "event": "few"}', "", "former: words\n"):
        write(tmp_path, text)
        assert node_logs.last_words(tmp_path, "x", 14 * text.startswith("former")) == []
    assert node_logs.last_words(tmp_path, "none") == []


def test_a_log_that_cannot_be_copied_deletes_no_former_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(_source: Path, copy: Path) -> None:
        copy.write_text("a part")
        raise OSError(errno.ENOSPC, "No space left on device")

    files = {"x.log": "the present one", "x.log.1": "former", "x.log.2": "earlier"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with monkeypatch.context() as patch:
        patch.setattr(node_logs.shutil, "copyfile", fill)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                node_logs.rotate(tmp_path / "x.log", 10, 3)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == files
    assert node_logs.rotate(tmp_path / "x.log", 10, 3)
    after = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert after == {"x.log": "", "x.log.1": "the present one", "x.log.2": "former"}
