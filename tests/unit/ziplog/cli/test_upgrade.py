"""`ziplog upgrade finish`."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.ziplog.cli.fakes import STATUS, FakeLog, run

if TYPE_CHECKING:
    from collections.abc import Callable

FINISH = ("upgrade", "finish")


@pytest.fixture
def report(log: FakeLog, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets the versions in the status document."""

    def show(in_use: int, *known: list[int] | None) -> None:
        document: dict[str, Any] = deepcopy(STATUS)
        document["wire_in_use"] = in_use
        replicas = document["shards"][0]["replicas"]
        nodes = [*document["mms"], *document["failure_handlers"], *replicas]
        for node, wires in zip(nodes, known, strict=True):
            node["wire_versions"] = wires
        monkeypatch.setattr(log, "cluster", lambda: document)

    return show


def test_the_highest_version_that_a_node_knows_is_requested(
    log: FakeLog, report: Callable[..., None]
) -> None:
    report(1, [1, 2], [1, 3], None, [1, 1])
    result = run(*FINISH)
    assert result.exit_code == 0
    assert log.calls[1:] == [("finish upgrade", 3)]
    assert result.stdout == ""
    assert "wire version 3 is in use; releases that do not know it cannot be" in result.stderr
    assert run(*FINISH, "--json").stdout == '{"wire_in_use":3}\n'


def test_without_a_later_version_there_is_nothing_to_do(
    log: FakeLog, report: Callable[..., None]
) -> None:
    report(2, [1, 2], [1, 2], [1, 2], [1, 2])
    result = run(*FINISH)
    assert result.exit_code == 0
    assert log.calls[1:] == [("finish upgrade", 2)]
    assert "nothing to do: wire version 2 is in use, and no node" in result.stderr


def test_a_leader_of_an_earlier_release_must_be_restarted_first(
    log: FakeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "cluster", lambda: STATUS)
    result = run(*FINISH)
    assert result.exit_code == 1
    assert "restart the membership nodes with the new release first" in result.stderr
    assert log.calls[1:] == []


def test_the_status_names_the_step_that_is_left(report: Callable[..., None]) -> None:
    report(1, [1, 2], [1, 2], [1, 2], [1, 2])
    assert "all nodes know version 2: `ziplog upgrade finish`" in " ".join(
        run("status").stdout.split()
    )
    report(1, [1, 2], [1, 2], [1, 2], [1, 1])
    assert "upgrade finish" not in run("status").stdout
