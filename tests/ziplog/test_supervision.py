"""A cluster that is looked after: the dead come back, the unreachable are replaced."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ziplog.nodes import exists, make, ready, rewrite, wait_until
from ziplog import revival, supervisor
from ziplog.errors import UnavailableError
from ziplog.runtime.transport import Transport
from ziplog.supervision import Supervision
from ziplog.supervisor import CLUSTER_FILE, Supervisor
from ziplog.wire import Order, Orders, OrdersQuery, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

NAMES = ("mms-0", "fh-0", "shard-0-0")


class FakeHandler:
    """A failure handler that answers every question with `orders`."""

    def __init__(self) -> None:
        self.transport = Transport("127.0.0.1:0")
        self.orders: list[Order] = []
        self.asked = 0
        #: What is added to the request's number in the answer.
        self.offset = 0
        self.garbage: list[bytes] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self.transport.wake()
        self._thread.join()
        self.transport.close()

    @property
    def port(self) -> int:
        assert self.transport.endpoint is not None
        return int(self.transport.endpoint.rpartition(":")[2])

    def _run(self) -> None:
        while not self._is_closed:
            self.transport.wait(None)
            while (received := self.transport.receive()) is not None:
                source, frame = received
                query = decode(frame)
                assert isinstance(query, OrdersQuery)
                self.asked += 1
                for garbage in self.garbage:
                    self.transport.send(source, garbage)
                answer = Orders(1, query.request + self.offset, self.orders)
                self.transport.send(source, encode(answer))


@pytest.fixture
def handler() -> Iterator[FakeHandler]:
    with FakeHandler() as fake:
        yield fake


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: FakeHandler) -> Path:
    make(tmp_path, handler_port=handler.port)
    monkeypatch.setattr(supervisor, "_PACKAGE_ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def running(directory: Path) -> Iterator[Supervisor]:
    with Supervisor(directory) as found:
        for name in NAMES:
            ready(found, name)
        yield found
        assert found.stop(timeout_s=0.5) in ([], ["shard-0-0"])


@pytest.fixture
def supervision(running: Supervisor) -> Iterator[Supervision]:
    found = Supervision(running)
    yield found
    found.stop()


def lives_again(running: Supervisor, name: str, pid: int) -> bool:
    return running.is_running(name) and running.pid(name) != pid


def processes_of(directory: Path) -> set[int]:
    """Processes that were told this directory's cluster file."""
    mine, found = str(directory / CLUSTER_FILE).encode(), set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mine in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def test_whatever_is_killed_comes_back(running: Supervisor, supervision: Supervision) -> None:
    for name in NAMES:
        pid = running.pid(name)
        running.kill(name)
        wait_until(lambda name=name, pid=pid: lives_again(running, name, pid))
        assert not exists(pid)


def test_a_node_that_the_handler_cannot_reach_is_replaced(
    running: Supervisor,
    supervision: Supervision,
    handler: FakeHandler,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pids = {name: running.pid(name) for name in NAMES}
    running.pause("shard-0-0")
    handler.orders = [Order("shard-0-0", 7), Order("elsewhere", 7)]
    wait_until(lambda: lives_again(running, "shard-0-0", pids["shard-0-0"]))
    assert not exists(pids["shard-0-0"])
    assert [running.pid(name) for name in NAMES[:2]] == [pids[name] for name in NAMES[:2]]
    assert "shard-0-0 runs, but cannot be reached" in caplog.text
    assert "recovery 7" in caplog.text


def test_garbage_and_late_answers_kill_nobody(
    running: Supervisor,
    supervision: Supervision,
    handler: FakeHandler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(revival, "PATIENCE_NS", 0)
    pid = running.pid("shard-0-0")
    handler.garbage = [b"\xc1", encode(OrdersQuery(0, 1))]
    handler.offset = -1
    handler.orders = [Order("shard-0-0", 7)]
    asked = handler.asked
    wait_until(lambda: handler.asked >= asked + 3)
    assert running.pid("shard-0-0") == pid
    assert "sent no message" in caplog.text
    handler.offset = 0
    wait_until(lambda: lives_again(running, "shard-0-0", pid))


def test_a_crash_loop_is_told_and_slows_down(
    directory: Path,
    running: Supervisor,
    supervision: Supervision,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rewrite(directory, "mms", "raise SystemExit('cannot go on')")
    running.kill("mms-0")
    wait_until(lambda: "starting again in 1.6 s" in caplog.text)
    assert [record.getMessage() for record in caplog.records] == [
        "mms-0 ended (signal 9); starting again in 0.2 s",
        *(
            f"mms-0 ended (exit code 1; its log ends: cannot go on); starting again in {pause} s"
            for pause in ("0.4", "0.8", "1.6")
        ),
    ]


def test_a_machine_that_can_start_no_process_is_tried_again(
    running: Supervisor,
    supervision: Supervision,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    pid = running.pid("mms-0")
    with monkeypatch.context() as full:
        full.setattr(supervisor, "_spawn", refuse)
        running.kill("mms-0")
        wait_until(lambda: "mms-0 cannot be started" in caplog.text)
    wait_until(lambda: lives_again(running, "mms-0", pid))


def test_a_stop_in_the_middle_of_a_start_leaves_no_process(
    directory: Path,
    running: Supervisor,
    supervision: Supervision,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_starting, is_stopping = threading.Event(), threading.Event()
    start = running.start

    def slow_start(name: str) -> None:
        is_starting.set()
        assert is_stopping.wait(20)
        start(name)

    def stop() -> None:
        supervision.stop()
        running.stop(timeout_s=0.5)

    monkeypatch.setattr(running, "start", slow_start)
    running.kill("mms-0")
    assert is_starting.wait(20)
    stopper = threading.Thread(target=stop)
    stopper.start()
    wait_until(supervision._stopped.is_set)
    is_stopping.set()
    stopper.join()
    assert processes_of(directory) == set()
    supervision.stop()


def test_many_threads_may_meddle_with_one_node(
    directory: Path, running: Supervisor, supervision: Supervision
) -> None:
    acts = (running.start, running.kill, running.replace, running.pause, running.resume)
    faults: list[BaseException] = []

    def meddle(seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(40):
            try:
                choice.choice(acts)("mms-0")
            except UnavailableError:
                continue
            except BaseException as error:  # noqa: BLE001 - told below
                faults.append(error)

    threads = [threading.Thread(target=meddle, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    supervision.stop()
    running.stop(timeout_s=0.5)
    assert processes_of(directory) == set()
