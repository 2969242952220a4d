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
PACKAGES = (
    "ziplog", "mms", "failure_handler", "shard", "logdb", "spark_reader", "pyspark_ziplog",
)  # fmt: skip
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
EVERYTHING = SOURCES + sorted(
    path for folder in ("tests", "scripts") for path in (ROOT / folder).rglob("*.py")
)
MAX_FUNCTION_LINES = 70
MAX_MODULE_LINES = 600
MAX_DOCSTRING_LINES = 15
DOES_IO = {
    "logdb.aio",
    "logdb.client.asynchronous",
    "logdb.client.blocking",
    "logdb.client.caller",
    "logdb.client.rows",
    "logdb.cli.commands",
    "logdb.defaults",
    "logdb.embedded",
    "logdb.coordinator.progress",
    "mms.emulation",
    "shard.datadir",
    "shard.files",
    "shard.flusher",
    "shard.lookup",
    "shard.mending",
    "ziplog.segments.archive",
    "ziplog.segments.directory",
    "ziplog.segments.memory",
    "ziplog.segments.segment",
    "shard.archive.board",
    "shard.archive.keeper",
    "shard.archive.maker",
    "shard.archive.pace",
    "shard.archive.server",
    "shard.segments",
    "spark_reader.ahead",
    "spark_reader.catalog",
    "spark_reader.cli",
    "spark_reader.data_source",
    "spark_reader.export",
    "spark_reader.file_source",
    "spark_reader.files",
    "spark_reader.inserting",
    "spark_reader.log_source",
    "spark_reader.placement",
    "spark_reader.ranges",
    "spark_reader.sources",
    "spark_reader.stream",
    "spark_reader.tasks",
    "spark_reader.write_options",
    "spark_reader.workers",
    "spark_reader.writer",
    "ziplog.client.arguments",
    "ziplog.client.asynchronous",
    "ziplog.client.blocking",
    "ziplog.client.engine",
    "ziplog.client.loop",
    "ziplog.client.scans",
    "ziplog.client.signals",
    "ziplog.client.threads",
}
#: Who may read which clock of `time`; nodes, and all that is compared with what a node measures,
#: use `ziplog.runtime.clock`. `monotonic`: how long the process itself waits; it stands still while
#: the machine is suspended. `time`: what time of day it is, which an operator may set back.
CLOCKS = {
    "logdb/client/caller.py": {"time_ns"},
    "logdb/coordinator/progress.py": {"monotonic"},
    "logdb/embedded.py": {"monotonic"},
    "mms/emulation.py": {"process_time"},
    "shard/archive/keeper.py": {"monotonic"},
    "shard/archive/pace.py": {"monotonic", "thread_time", "time"},
    "shard/flusher.py": {"monotonic"},
    "spark_reader/stream.py": {"monotonic"},
    "ziplog/cli/servers.py": {"monotonic"},
    "ziplog/cli/shards.py": {"monotonic"},
    "ziplog/client/arguments.py": {"time_ns"},
    "ziplog/client/threads.py": {"monotonic"},
    "ziplog/demo/inserter.py": {"perf_counter_ns"},
    "ziplog/demo/parts.py": {"monotonic"},
    "ziplog/demo/run.py": {"monotonic"},
    "ziplog/growth.py": {"monotonic"},
    "ziplog/local.py": {"monotonic"},
    "ziplog/runtime/clock.py": {"clock_gettime_ns", "monotonic_ns"},
    "ziplog/runtime/floods.py": {"monotonic_ns", "thread_time_ns"},
    "ziplog/runtime/links.py": {"monotonic"},
    "ziplog/runtime/receive.py": {"monotonic"},  # the clock of PySyncObj's timers
    "ziplog/segments/directory.py": {"time_ns"},
    "ziplog/supervision.py": {"monotonic_ns"},
    "ziplog/supervisor.py": {"monotonic", "monotonic_ns"},
}
_READS_A_CLOCK = {
    *(
        ("time", f"{name}{unit}")
        for name in ("clock_gettime", "monotonic", "perf_counter", "process_time", "thread_time")
        for unit in ("", "_ns")
    ),
    ("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"),
    ("date", "today"),
}  # fmt: skip
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


def clocks_of(module: ast.Module) -> set[str]:
    """Return the clocks of `time` and `datetime` that a module reads."""
    found = {
        node.attr
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in _READS_A_CLOCK
    }
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found |= {alias.name for alias in node.names if ("time", alias.name) in _READS_A_CLOCK}
    return found


def test_only_these_modules_read_these_clocks() -> None:
    found = {name_of(path): clocks_of(parse(path)) for path in SOURCES}
    assert {name: clocks for name, clocks in found.items() if clocks} == CLOCKS


def test_every_module_beside_a_protocol_is_held_to_purity_or_known_to_do_io() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (pure,) = (entry for entry in contracts["contracts"] if entry["id"] == "pure")
    folders = {
        ROOT / name
        for name in (
            "shard",
            "shard/archive",
            "mms",
            "failure_handler",
            "logdb",
            "logdb/cleaner",
            "logdb/cli",
            "logdb/client",
            "logdb/coordinator",
            "spark_reader",
            "ziplog/client",
            "ziplog/segments",
        )
    }
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in SOURCES
        if path.parent in folders and not path.name.startswith("__")
    }
    assert modules - set(pure["source_modules"]) == DOES_IO


def test_every_package_is_known_and_says_that_it_is_typed() -> None:
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert set(configured["importlinter"]["root_packages"]) == set(PACKAGES)
    assert set(configured["hatch"]["build"]["targets"]["wheel"]["packages"]) == set(PACKAGES)
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").is_file()] == []


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


def test_a_blocking_program_does_not_load_asyncio() -> None:
    program = "import sys, ziplog; sys.exit('asyncio' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
