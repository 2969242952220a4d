"""Questions on a terminal, and the exit codes of their answers."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import pytest

from ziplog.cli import app

if TYPE_CHECKING:
    from tests.unit.ziplog.cli.fakes import FakeLog


class Terminal(io.StringIO):
    """A terminal on which an operator types a line, or presses Ctrl-C (None)."""

    def __init__(self, answer: str | None) -> None:
        super().__init__(answer)
        self._is_interrupted = answer is None

    def isatty(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> str:
        if self._is_interrupted:
            raise KeyboardInterrupt
        return super().readline(size)


@pytest.mark.parametrize(("answer", "code"), [(None, 130), ("", 1), ("n\n", 1), ("y\n", 0)])
def test_a_trim_needs_yes_and_ctrl_c_is_code_130(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch, answer: str | None, code: int
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    with pytest.raises(SystemExit) as ended:
        app(["trim", "5"])
    assert ended.value.code == code
    assert any(call[0] == "trim" for call in log.calls) == (code == 0)
