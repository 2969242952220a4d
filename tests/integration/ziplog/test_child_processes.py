"""Child processes that end with their parent."""

from __future__ import annotations

import subprocess
import sys

from tests.forking import in_child
from ziplog.runtime import child_processes


def output_of_a_child() -> str:
    command = [sys.executable, "-c", "print('started')"]
    with child_processes.spawn(command, subprocess.DEVNULL, subprocess.PIPE) as child:
        assert child.stdout is not None
        return child.stdout.read().decode().strip()


def test_a_forked_process_starts_children_as_its_parent_did() -> None:
    assert output_of_a_child() == "started"
    assert in_child(output_of_a_child) == "started"
