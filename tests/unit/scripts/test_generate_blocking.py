from __future__ import annotations

import inspect
import shutil
from typing import TYPE_CHECKING, Any

import generate_blocking
import pytest

import logdb
import ziplog
from logdb import aio as logdb_aio
from ziplog import aio

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = "ziplog/client/asynchronous.py"
TARGET = "ziplog/client/blocking.py"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for target, source in generate_blocking.SOURCES.items():
        for name in (target, source):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(generate_blocking.ROOT / name, tmp_path / name)
    return tmp_path


def test_the_committed_files_are_the_generated_ones() -> None:
    assert [name for name, _ in generate_blocking.differing()] == []


def test_a_changed_source_is_reported_until_its_file_is_generated(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = (tree / SOURCE).read_text().replace('"""Return the client."""', '"""Enter."""')
    (tree / SOURCE).write_text(changed)
    before = (tree / TARGET).read_text()
    assert generate_blocking.main(["--check"], tree) == 1
    assert capsys.readouterr().err.startswith(f"{TARGET} differs from {SOURCE}: ")
    assert (tree / TARGET).read_text() == before
    assert generate_blocking.main([], tree) == 0
    assert '"""Enter."""' in (tree / TARGET).read_text()
    assert generate_blocking.main(["--check"], tree) == 0


def test_an_edited_or_missing_file_is_reported(tree: Path) -> None:
    with (tree / TARGET).open("a") as file:
        file.write("# edited\n")
    assert [name for name, _ in generate_blocking.differing(tree)] == [TARGET]
    (tree / TARGET).unlink()
    assert [name for name, _ in generate_blocking.differing(tree)] == [TARGET]


def test_no_word_of_asyncio_is_left() -> None:
    source = '''\
import asyncio
async def close(log: AsyncLog) -> asyncio.Future[int]:
    """Close an `async with` statement, an async iterator. An async context manager."""
    await log
    async with log, await log.subscribe() as subscription:
        async for record in subscription:
            raise StopAsyncIteration(await record, __aexit__, "<ziplog.aio.AsyncLog>")
'''
    expected = '''# Generated from a.py by scripts/generate_blocking.py; do not edit.
from concurrent.futures import Future


def close(log: Log) -> Future[int]:
    """Close a `with` statement, an iterator. A context manager."""
    log
    with log, log.subscribe() as subscription:
        for record in subscription:
            raise StopIteration(record, __exit__, "<ziplog.Log>")
'''
    assert generate_blocking.generate(source, "a.py") == expected


def names(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


@pytest.mark.parametrize(
    ("blocking", "asynchronous"),
    [
        (ziplog.Log, aio.AsyncLog),
        (ziplog.Subscription, aio.AsyncSubscription),
        (ziplog.Scan, aio.AsyncScan),
        (logdb.Database, logdb_aio.Database),
        (logdb.Transaction, logdb_aio.Transaction),
        (logdb.Snapshot, logdb_aio.Snapshot),
        (logdb.Watch, logdb_aio.Watch),
    ],
)
def test_both_sides_have_the_same_methods_and_arguments(blocking: type, asynchronous: type) -> None:
    ours, theirs = names(blocking), names(asynchronous)
    assert ours.keys() == theirs.keys()
    for name, method in ours.items():
        if inspect.isfunction(method):
            arguments = inspect.signature(method).parameters
            assert arguments == inspect.signature(theirs[name]).parameters, name
