"""The workers of the tests: one that crashes costs its test only (`tests/conftest.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from tests.conftest import Groups

_ROOT: Final = Path(__file__).resolve().parents[2]
_CONFTEST: Final = "from tests.conftest import pytest_xdist_make_scheduler\n"
_HEAD: Final = "import os, pathlib, pytest\n"
_TEST: Final = """
def test_{name}():
    with open(pathlib.Path(__file__).with_name("log"), "a") as log:
        print("{module}_{name}", file=log)
    {body}
"""


def write_module(folder: Path, module: str, **bodies: str) -> None:
    """Write a module of tests that log their names, then run a statement."""
    tests = [_TEST.format(module=module, name=name, body=body) for name, body in bodies.items()]
    (folder / f"test_{module}.py").write_text(_HEAD + "".join(tests))


def run_tests(folder: Path, workers: int) -> tuple[str, list[str]]:
    """Run the tests of a folder; return the summary, and the names of the tests that ran."""
    (folder / "conftest.py").write_text(_CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", str(workers), "-q", "-p", "no:cacheprovider"],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(_ROOT)}, timeout=90,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    ran = (folder / "log").read_text().split()
    return done.stdout.splitlines()[-1].partition(" in ")[0], sorted(ran)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_other_tests_of_a_crashed_worker_run_once(tmp_path: Path, workers: int) -> None:
    crash = "os._exit(7)"
    write_module(tmp_path, "a", before="pass", crash=crash, after="pass")
    write_module(tmp_path, "b", one="pass")
    write_module(tmp_path, "c", last=crash)
    write_module(tmp_path, "d", one="pass", two="pass", three="pass")
    assert run_tests(tmp_path, workers) == (
        "2 failed, 6 passed",
        ["a_after", "a_before", "a_crash", "b_one", "c_last", "d_one", "d_three", "d_two"],
    )


class FakeWorker:
    """A worker that records the tests which it got, by index."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = self.is_dead = False
        self.tests: list[int] = []

    def send_runtest_some(self, tests: list[int]) -> None:
        if self.is_dead:
            raise OSError("cannot send (already closed?)")
        self.tests += tests

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduler(workers: int) -> Any:
    option = SimpleNamespace(loadscopereorder=False)
    config = SimpleNamespace(option=option, getvalue=lambda _: [f"{workers}*popen"])
    log = SimpleNamespace(loadscopesched=lambda *_: None)
    return Groups(config, log)  # type: ignore[arg-type]


def started(workers: int, tests: list[str]) -> tuple[Any, list[FakeWorker]]:
    groups, nodes = scheduler(workers), [FakeWorker(f"gw{n}") for n in range(workers)]
    for node in nodes:
        groups.add_node(node)
        groups.add_node_collection(node, tests)
    groups.schedule()
    return groups, nodes


TESTS: Final = [f"tests/unit/test_{module}.py::test_it" for module in "abcdefgh"]


def test_a_worker_that_crashed_without_a_report_yet_gets_no_tests() -> None:
    groups, (first, second) = started(2, TESTS)
    assert (first.tests, second.tests) == ([0, 2, 3], [1, 4, 5])
    first.is_dead = True
    groups.mark_test_complete(first, 0)  # Sent before the crash.
    assert groups.remove_node(first) == TESTS[2]
    for test in second.tests:
        groups.mark_test_complete(second, test)
    assert second.tests == [1, 4, 5, 7, 3, 6]


def test_a_worker_that_still_collects_gets_no_tests() -> None:
    groups, (first, second) = started(2, TESTS)
    third = FakeWorker("gw2")
    assert groups.remove_node(first) == TESTS[0]
    groups.add_node(third)
    assert groups.remove_node(second) == TESTS[1]
    groups.add_node_collection(third, TESTS)
    groups.schedule()
    assert third.tests[:3] == [6, 7, 2]
