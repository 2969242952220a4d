"""The endpoint of examples/player_endpoint.py has each record once, whatever fails."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from player_endpoint import Endpoint

import logplayer
from logplayer import targets
from logplayer.contract import Fenced, Opened, Rejected, Retry
from logplayer.targets.http_target import HttpTarget
from tests.properties import examples
from tests.unit.logplayer.targets.databases import GSNS, batch, record, task
from ziplog.errors import ConfigError
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import ziplog
    from logplayer.contract import Task


class LossyTarget(HttpTarget):
    """A target that loses the next request, or its answer."""

    fault = ""

    def _send(self, *arguments: object) -> object:  # type: ignore[override]
        fault, self.fault = self.fault, ""
        if fault == "before":
            raise ConnectionResetError("lost")
        answer = super()._send(*arguments)  # type: ignore[arg-type]
        if fault == "after":
            self.close()
            raise ConnectionResetError("lost")
        return answer


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    with Endpoint(str(tmp_path / "events.db")) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


class Targets:
    """Makes targets of the endpoint, and closes them."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._made: list[LossyTarget] = []

    def __call__(self) -> LossyTarget:
        url = f"http://127.0.0.1:{self.endpoint.server_port}/"
        made = targets.http("warehouse", url, position="endpoint").connect()
        assert isinstance(made, HttpTarget)
        self._made.append(LossyTarget(made._endpoint))
        return self._made[-1]

    def close(self) -> None:
        for target in self._made:
            target.close()
        self._made.clear()


@pytest.fixture
def lossy(endpoint: Endpoint) -> Iterator[Targets]:
    made = Targets(endpoint)
    yield made
    made.close()


def stored(endpoint: Endpoint) -> tuple[int, list[int]]:
    """Return the position and the records of the endpoint."""
    with closing(sqlite3.connect(endpoint.path)) as database:
        ((position,),) = database.execute("SELECT position FROM positions").fetchall()
        gsns = [row[0] for row in database.execute("SELECT gsn FROM events ORDER BY gsn")]
    return position, gsns


def test_former_owner_is_fenced(endpoint: Endpoint, lossy: Targets) -> None:
    former, successor = lossy(), lossy()
    assert former.open(task(1)) == Opened(1)
    former.deliver(batch(task(1), 1, 4))
    assert successor.open(task(2, position=2, has_moved=True)) == Opened(4)
    with pytest.raises(Fenced):
        former.deliver(batch(task(1), 4, 9))
    with pytest.raises(Fenced, match="term 2 is stored"):
        former.open(task(1))
    successor.deliver(batch(task(2), 4, 9))
    assert stored(endpoint) == (9, [1, 2, 3, 5, 8])


def test_absent_position_and_other_cursors_are_refused(lossy: Targets) -> None:
    target = lossy()
    with pytest.raises(ConfigError, match="moved to 5"):
        target.open(task(1, position=5, has_moved=True))
    target.open(task(1))
    with pytest.raises(Rejected, match="another cursor's"):
        target.open(task(2, cluster=8))
    assert target.open(task(3, position=5, seek=1)) == Opened(5)
    assert target.open(task(4, position=5, seek=1)) == Opened(5)


def test_older_state_from_before_a_seek_fails_the_task_until_a_seek(lossy: Targets) -> None:
    target = lossy()
    target.open(task(1))
    target.deliver(batch(task(1), 1, 4))
    with pytest.raises(ConfigError, match=r"since its last seek.* moved to 15"):
        target.open(task(3, position=15, seek=1, has_moved=True))
    assert target.open(task(4, position=4, seek=2)) == Opened(4)


def test_rejected_record_changes_nothing(endpoint: Endpoint, lossy: Targets) -> None:
    target = lossy()
    target.open(task(1))
    with pytest.raises(Rejected, match="UNIQUE"):
        target.deliver(batch(task(1), 1, 4, [record(1), record(2), record(2)]))
    assert stored(endpoint) == (1, [])


steps = st.tuples(
    st.sampled_from(["claim", "open", "deliver"]),
    st.integers(0, 1),
    st.sampled_from(["", "before", "after"]),
)


class Owner:
    """A process that believes to own the task."""

    def __init__(self, target: LossyTarget) -> None:
        self.target = target
        self.task: Task = task(0)
        self.at: int | None = None

    def open(self) -> None:
        self.at = None
        with suppress(Fenced, Retry):
            self.at = self.target.open(self.task).position

    def deliver(self) -> None:
        if self.at is None:
            return
        stop = next((gsn for gsn in GSNS if gsn >= self.at + 2), self.at + 1) + 1
        with suppress(Fenced, Retry):
            self.target.deliver(batch(self.task, self.at, stop))
            self.at = stop


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.lists(steps, max_size=12))
def test_any_order_of_steps_keeps_position_and_effects_equal(
    lossy: Targets, plan: list[tuple[str, int, str]]
) -> None:
    endpoint = lossy.endpoint
    with closing(sqlite3.connect(endpoint.path)) as database, database:
        database.execute("DELETE FROM events")
        database.execute("DELETE FROM positions")
    lossy().open(task(0))
    owners, term = [Owner(lossy()), Owner(lossy())], 0
    for what, number, fault in plan:
        owner = owners[number]
        owner.target.fault = fault
        if what == "claim":
            term += 1
            owner.task = task(term)
        if what == "deliver":
            owner.deliver()
        else:
            owner.open()
        owner.target.fault = ""
        position, gsns = stored(endpoint)
        assert gsns == [gsn for gsn in GSNS if gsn < position]
    lossy.close()


def test_player_fills_the_endpoint(log: ziplog.Log, endpoint: Endpoint) -> None:
    start = RecordId(log.check_tail().gsn + 1, 0)
    rids = log.insert_many([b"%d" % number for number in range(200)])
    url = f"http://127.0.0.1:{endpoint.server_port}/"
    target = targets.http("hook", url, position="endpoint", batch_records=20)
    for half in (100, 200):
        with logplayer.Player(log, "endpoint", [target], start=start) as player:
            player.wait_until(rids[half - 1], timeout=60)
    assert stored(endpoint)[1] == sorted(rid.gsn for rid in rids)
