"""No traceback: closed and full standard streams, and Ctrl-C before a verb runs."""

from __future__ import annotations

import contextlib
import os
import pty
import socket
import subprocess
import sys

import pytest

#: Raises SIGINT while the command line is being loaded, at the import of a module.
_INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # Ignored in jobs of the background.
sys.meta_path.insert(0, Finder())
sys.argv = ["ziplog", "config", "show"]
from ziplog.__main__ import main
main()
"""


def shell(command: str) -> subprocess.CompletedProcess[str]:
    line = f"{sys.executable} -m ziplog {command}"
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize("name", ["ziplog.cli", "ziplog.wire", "ziplog.cli.settings"])
def test_ctrl_c_while_the_command_line_is_loaded_is_silent(name: str) -> None:
    program = _INTERRUPTED.format(name=name)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("verb", ["config show", "--version", "--help", "status", "tail"])
def test_a_closed_stdout_is_one_line(verb: str) -> None:
    done = shell(f"{verb} >&-")
    assert done.returncode == 1
    assert done.stderr == (
        "ziplog: error: stdout is closed; redirect it to /dev/null to discard the output\n"
    )
    assert shell(f"{verb} >&- 2>&-").returncode == 1


@pytest.mark.parametrize("verb", ["config show", "--version", "--help"])
def test_a_full_stdout_is_one_line(verb: str) -> None:
    done = shell(f"{verb} >/dev/full")
    assert done.returncode == 1
    assert done.stderr == "ziplog: error: input or output: No space left on device\n"


def test_a_closed_pipe_is_no_failure_of_a_table() -> None:
    plan = "region plan A B C | true; exit ${PIPESTATUS[0]}"
    assert shell(plan).returncode == 0
    program = (
        "import sys; from ziplog.cli import app; from ziplog.cli.tables import stdout;"
        "app.command('shown')(lambda: stdout().print('a table')); sys.argv[1:] = ['shown']; app()"
    )
    piped = f'{sys.executable} -c "{program}" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_stderr_changes_nothing() -> None:
    done = shell("config show 2>&-")
    assert done.returncode == 0
    assert done.stdout == shell("config show").stdout


def test_a_wait_is_shown_on_a_terminal_and_not_in_a_pipe() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        verb = f"status --timeout 2 --bootstrap 127.0.0.1:{silent.getsockname()[1]}"
        assert "connecting to" not in shell(verb).stderr
        terminal, end = pty.openpty()
        line = [sys.executable, "-m", "ziplog", *verb.split()]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
        with subprocess.Popen(line, stderr=end, env=environment) as process:
            os.close(end)
            shown = b""
            with contextlib.suppress(OSError):  # raised at the end of a terminal
                while part := os.read(terminal, 4096):
                    shown += part
        os.close(terminal)
        assert process.returncode == 1
        assert b"connecting to 127.0.0.1" in shown


@pytest.mark.parametrize("verb", ["insert -", "kv txn"])
def test_a_closed_stdin_is_no_empty_record(verb: str) -> None:
    done = shell(f"{verb} --timeout 0.1 <&-")
    assert done.returncode in {1, 2}
    assert done.stderr.startswith("ziplog: error: ")
    assert done.stderr.count("\n") == 1
