"""The house rules that a machine can check: layers, purity, sizes, no pickle."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path
    for package in ("ziplog", "mms", "failure_handler", "shard")
    for path in (ROOT / package).rglob("*.py")
)
EVERYTHING = SOURCES + sorted(
    path for folder in ("tests", "scripts") for path in (ROOT / folder).rglob("*.py")
)
MAX_FUNCTION_LINES = 70
MAX_MODULE_LINES = 600
MAX_DOCSTRING_LINES = 15
DOES_IO = {
    "mms.emulation",
    "shard.datadir",
    "shard.files",
    "shard.flusher",
    "shard.lookup",
    "shard.mending",
    "shard.segment",
    "shard.segments",
    "ziplog.client.arguments",
    "ziplog.client.asynchronous",
    "ziplog.client.blocking",
    "ziplog.client.engine",
    "ziplog.client.threads",
}
RUNS_FOREIGN_CODE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(module: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(module) if isinstance(node, kinds)]


def imported(module: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def length_without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    docstring = 0
    if ast.get_docstring(node, clean=False) is not None:
        first = node.body[0]
        assert first.end_lineno is not None
        docstring = first.end_lineno - first.lineno + 1
    return node.end_lineno - node.lineno + 1 - docstring


def test_every_import_obeys_the_layers() -> None:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as run; run()",
    ]
    done = subprocess.run(
        [*command, "--no-cache"], check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_beside_a_protocol_is_held_to_purity_or_known_to_do_io() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (pure,) = (entry for entry in contracts["contracts"] if entry["id"] == "pure")
    folders = {ROOT / name for name in ("shard", "mms", "failure_handler", "ziplog/client")}
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in SOURCES
        if path.parent in folders and not path.name.startswith("__")
    }
    assert modules - set(pure["source_modules"]) == DOES_IO


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_function_is_long(path: Path) -> None:
    long = {
        node.name: length_without_docstring(node)
        for node in functions(parse(path))
        if length_without_docstring(node) > MAX_FUNCTION_LINES
    }
    assert not long


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_module_is_long(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_MODULE_LINES


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    if not path.read_text(encoding="utf-8").strip():
        pytest.skip("the file is empty")
    docstring = ast.get_docstring(parse(path))
    assert docstring
    assert len(docstring.splitlines()) <= MAX_DOCSTRING_LINES


@pytest.mark.parametrize("path", EVERYTHING, ids=name_of)
def test_nothing_can_run_code_that_a_peer_sent(path: Path) -> None:
    assert not imported(parse(path)) & RUNS_FOREIGN_CODE


def test_only_the_adapter_knows_the_consensus_library() -> None:
    users = {name_of(path) for path in SOURCES if "pysyncobj" in imported(parse(path))}
    adapter = ("raft", "binding", "receive", "links")
    assert users <= {f"ziplog/runtime/{name}.py" for name in adapter}


def test_only_the_runtime_knows_the_socket_library() -> None:
    users = {name_of(path) for path in SOURCES if "zmq" in imported(parse(path))}
    assert all(user.startswith("ziplog/runtime/") for user in users), users
