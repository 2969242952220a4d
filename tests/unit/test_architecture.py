"""The house rules that a machine can check: layers, purity, sizes, no pickle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "ziplog", "mms", "failure_handler", "shard", "logdb", "logplayer", "spark_reader",
    "pyspark_ziplog",
)  # fmt: skip
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
EVERYTHING = SOURCES + sorted(
    path for folder in ("tests", "scripts", "examples") for path in (ROOT / folder).rglob("*.py")
)
MAX_FUNCTION_LINES = 70
MAX_MODULE_LINES = 600
MAX_DOCSTRING_LINES = 15
#: Packages and modules whose work is input and output; everything else is pure.
DOES_IO = {
    "logdb.aio",
    "logdb.cli.bench",
    "logdb.cli.commands",
    "logdb.cli.measuring",
    "logdb.client.async_base",
    "logdb.client.async_rows",
    "logdb.client.async_transaction",
    "logdb.client.asynchronous",
    "logdb.client.blocking",
    "logdb.client.blocking_base",
    "logdb.client.blocking_rows",
    "logdb.client.blocking_transaction",
    "logdb.client.engines",
    "logdb.coordinator.progress",
    "logdb.defaults",
    "logdb.embedded",
    "logplayer.aio",
    "logplayer.cli",
    "logplayer.config",
    "logplayer.dead_letters",
    "logplayer.example",
    "logplayer.kinds",
    "logplayer.new_cursors",
    "logplayer.player",
    "logplayer.receiver",
    "logplayer.seeks",
    "logplayer.targets",
    "logplayer.workers",
    "shard.archive",
    "shard.holdings",
    "shard.storage.data_directory",
    "shard.storage.flusher",
    "shard.storage.segment_files",
    "shard.storage.segment_reader",
    "shard.storage.segment_rewrite",
    "shard.storage.segment_store",
    "spark_reader.catalog",
    "spark_reader.cli",
    "spark_reader.data_source",
    "spark_reader.export",
    "spark_reader.file_source",
    "spark_reader.files",
    "spark_reader.inserting",
    "spark_reader.log_source",
    "spark_reader.placement",
    "spark_reader.prefetch",
    "spark_reader.ranges",
    "spark_reader.sources",
    "spark_reader.stream",
    "spark_reader.tasks",
    "spark_reader.worker_state",
    "spark_reader.write_options",
    "spark_reader.writer",
    "ziplog.aio",
    "ziplog.archive",
    "ziplog.bench",
    "ziplog.cli",
    "ziplog.client.arguments",
    "ziplog.client.async_administration",
    "ziplog.client.async_base",
    "ziplog.client.async_cursors",
    "ziplog.client.async_iterators",
    "ziplog.client.async_speculation",
    "ziplog.client.asynchronous",
    "ziplog.client.blocking",
    "ziplog.client.blocking_administration",
    "ziplog.client.blocking_base",
    "ziplog.client.blocking_cursors",
    "ziplog.client.blocking_iterators",
    "ziplog.client.blocking_speculation",
    "ziplog.client.cursor_arguments",
    "ziplog.client.placement_arguments",
    "ziplog.client.engines",
    "ziplog.config",
    "ziplog.demo",
    "ziplog.defaults",
    "ziplog.deploy",
    "ziplog.event_log",
    "ziplog.local",
    "ziplog.metrics",
    "ziplog.otel",
    "ziplog.monitor.cursor_polls",
    "ziplog.monitor.nodes",
    "ziplog.monitor.server",
    "ziplog.monitor.service",
    "ziplog.policy",
    "ziplog.raft",
    "ziplog.runtime",
    "ziplog.segments.block_reader",
    "ziplog.segments.buffer_pool",
    "ziplog.segments.directory",
    "ziplog.segments.durable_files",
    "ziplog.segments.segment",
    "ziplog.speculation",
    "ziplog.testing",
    "ziplog.version",
}
#: Which modules read which clock of `time`. Nodes, and all that is compared with what a node
#: measures, use `ziplog.runtime.clock`. `monotonic`: how long the process itself waits; it stands
#: still while the machine is suspended. `time`: what time of day it is, which an operator may set
#: back.
CLOCKS = {
    "logdb/cli/measuring.py": {"monotonic_ns"},
    "logdb/coordinator/progress.py": {"monotonic"},
    "logdb/embedded.py": {"monotonic", "time_ns"},
    "logplayer/cli/task_positions.py": {"monotonic", "time"},
    "logplayer/player.py": {"time_ns"},
    "logplayer/targets/http_target.py": {"monotonic", "time"},
    "logplayer/workers.py": {"monotonic"},
    "shard/archive/supervisor.py": {"monotonic"},
    "shard/archive/throttle.py": {"monotonic", "thread_time", "time"},
    "shard/storage/flusher.py": {"monotonic", "monotonic_ns"},
    "spark_reader/cli.py": {"time_ns"},
    "spark_reader/stream.py": {"monotonic"},
    "ziplog/archive/sockets.py": {"monotonic"},
    "ziplog/bench/client.py": {"monotonic_ns"},
    "ziplog/bench/processes.py": {"monotonic"},
    "ziplog/cli/check.py": {"time_ns"},
    "ziplog/cli/cursors.py": {"monotonic"},
    "ziplog/cli/positions.py": {"time_ns"},
    "ziplog/cli/events.py": {"time_ns"},
    "ziplog/cli/known_names.py": {"monotonic"},
    "ziplog/cli/servers.py": {"monotonic"},
    "ziplog/cli/shards.py": {"monotonic"},
    "ziplog/client/arguments.py": {"time_ns"},
    "ziplog/client/engines/pending_futures.py": {"monotonic"},
    "ziplog/demo/inserter.py": {"perf_counter_ns"},
    "ziplog/demo/parts.py": {"monotonic"},
    "ziplog/demo/playing.py": {"monotonic"},
    "ziplog/demo/run.py": {"monotonic"},
    "ziplog/deploy/cluster_file.py": {"monotonic"},
    "ziplog/deploy/config_reload.py": {"monotonic"},
    "ziplog/deploy/membership_rebuild.py": {"time_ns"},
    "ziplog/deploy/new_shard.py": {"monotonic"},
    "ziplog/deploy/rolling_restart.py": {"monotonic"},
    "ziplog/monitor/cursor_polls.py": {"monotonic", "time", "time_ns"},
    "ziplog/monitor/server.py": {"monotonic"},
    "ziplog/local.py": {"monotonic"},
    "ziplog/runtime/clock.py": {"clock_gettime_ns", "monotonic_ns", "time_ns"},
    "ziplog/runtime/metrics.py": {"thread_time", "time"},
    "ziplog/runtime/resolver.py": {"monotonic_ns"},
    "ziplog/runtime/waiting.py": {"monotonic"},
    "ziplog/raft/connections.py": {"monotonic"},
    "ziplog/raft/raft_node.py": {"monotonic"},  # the clock of PySyncObj's timers
    "ziplog/segments/directory.py": {"time_ns"},
    "ziplog/deploy/supervisor_thread.py": {"monotonic_ns"},
    "ziplog/deploy/supervisor.py": {"monotonic", "monotonic_ns"},
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


def mentions(path: Path, names: set[str]) -> bool:
    text = path.read_text(encoding="utf-8")
    return any(name in text for name in names)


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
    held = tuple(name.removesuffix(".*") for name in pure["source_modules"])
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in SOURCES
        if not path.name.startswith("__") and path.relative_to(ROOT).parts[0] != "pyspark_ziplog"
    }
    impure = {name for name in modules if not f"{name}.".startswith(tuple(f"{h}." for h in held))}
    known = tuple(f"{name}." for name in DOES_IO)
    assert {name for name in impure if not f"{name}.".startswith(known)} == set()
    assert {
        name for name in DOES_IO if not any(f"{m}.".startswith(f"{name}.") for m in impure)
    } == set()


def test_every_package_is_known_and_says_that_it_is_typed() -> None:
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert set(configured["importlinter"]["root_packages"]) == set(PACKAGES)
    assert set(configured["hatch"]["build"]["targets"]["wheel"]["packages"]) == set(PACKAGES)
    assert [name for name in PACKAGES if not (ROOT / name / "py.typed").is_file()] == []


def test_the_code_map_names_every_module_and_nothing_else() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = text.partition("## Code map")[2].partition("`__main__.py` is I/O")[0]
    names = set(re.findall(r"`([\w/.*-]+)`", rows))
    folders = tuple(name for name in names if name.endswith("/"))
    files = {Path(name).stem for name in names if "." in name} | names
    missing = {
        name
        for name in map(name_of, SOURCES)
        if not Path(name).name.startswith(("__", "blocking"))
        and not name.startswith(folders)
        and Path(name).stem not in files
    }
    assert not missing
    paths = {name for name in names if "/" in name and not name.startswith("/")}
    assert {name for name in paths if not list(ROOT.glob(name))} == set()


def test_no_function_is_long() -> None:
    long = {
        f"{name_of(path)}: {node.name}": length_without_docstring(node)
        for path in SOURCES
        for node in functions(parse(path))
        if length_without_docstring(node) > MAX_FUNCTION_LINES
    }
    assert not long


def test_no_module_is_long() -> None:
    lines = {name_of(path): path.read_text(encoding="utf-8").count("\n") for path in SOURCES}
    assert not {name: count for name, count in lines.items() if count > MAX_MODULE_LINES}


def test_every_module_says_what_it_is() -> None:
    docstrings = {
        name_of(path): ast.get_docstring(parse(path)) or ""
        for path in SOURCES
        if path.read_text(encoding="utf-8").strip()
    }
    lengths = {name: len(text.splitlines()) for name, text in docstrings.items()}
    assert not {name for name, lines in lengths.items() if not 1 <= lines <= MAX_DOCSTRING_LINES}


def test_nothing_can_run_code_that_a_peer_sent() -> None:
    # To parse all files takes seconds. A module that is imported is mentioned.
    suspects = [path for path in EVERYTHING if mentions(path, RUNS_FOREIGN_CODE)]
    assert not {name_of(path) for path in suspects if imported(parse(path)) & RUNS_FOREIGN_CODE}


def test_only_the_adapter_knows_the_consensus_library() -> None:
    users = {name_of(path) for path in SOURCES if "pysyncobj" in imported(parse(path))}
    assert all(user.startswith("ziplog/raft/") for user in users), users


def test_a_blocking_program_does_not_load_asyncio() -> None:
    program = "import sys, ziplog; ziplog.Log; sys.exit('asyncio' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
