"""The supervisor thread: dead nodes are restarted, unreachable ones replaced."""

from __future__ import annotations

import errno
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.ziplog.nodes import exists, make, ready, rewrite
from tests.waiting import wait_until
from ziplog.config import NodeConfig, ShardConfig
from ziplog.config_text import dump_shard
from ziplog.deploy import new_shard, restart_policy, supervisor, supervisor_thread
from ziplog.deploy.supervisor import CLUSTER_FILE, Supervisor
from ziplog.deploy.supervisor_thread import SupervisorThread
from ziplog.errors import ConfigError, UnavailableError
from ziplog.runtime import child_processes
from ziplog.runtime.transport import Transport
from ziplog.wire import Order, Orders, OrdersQuery, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

NAMES = ("mms-0", "fh-0", "shard-0-0")
NOT_TAKEN = "the cluster file was changed, but the change is ignored"


class FakeHandler:
    """A failure handler that answers every query with `orders`."""

    def __init__(self) -> None:
        self.transport = Transport("127.0.0.1:0")
        self.orders: list[Order] = []
        self.asked = 0
        #: Added to the request's number in the reply.
        self.offset = 0
        #: Number of later queries that it gets before it answers one.
        self.behind = 0
        self._queries: list[int] = []
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
                self._queries.append(query.request)
                while len(self._queries) > self.behind:
                    answer = Orders(1, self._queries.pop(0) + self.offset, self.orders)
                    self.transport.send(source, encode(answer))


@pytest.fixture
def handler() -> Iterator[FakeHandler]:
    with FakeHandler() as fake:
        yield fake


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: FakeHandler) -> Path:
    make(tmp_path, handler_port=handler.port)
    monkeypatch.setattr(child_processes, "_PACKAGE_ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def running(directory: Path) -> Iterator[Supervisor]:
    with Supervisor(directory) as found:
        for name in NAMES:
            ready(found, name)
        yield found
        assert found.stop(timeout_s=2.0) in ([], ["shard-0-0"])


@pytest.fixture
def supervision(running: Supervisor) -> Iterator[SupervisorThread]:
    found = SupervisorThread(running)
    yield found
    found.stop()


def await_return(running: Supervisor, name: str, pid: int) -> None:
    """Wait until a node runs again, as another process."""
    wait_until(lambda: running.is_running(name) and running.pid(name) != pid, f"{name} comes back")


def await_start(running: Supervisor, name: str) -> None:
    """Wait until a node that was added to the cluster file runs."""
    wait_until(lambda: name in running.names and running.is_running(name), f"{name} is started")


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def processes_of(directory: Path) -> set[int]:
    """Return the processes with this directory's cluster file as an argument."""
    mine, found = str(directory / CLUSTER_FILE).encode(), set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mine in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_killed_node_is_restarted(running: Supervisor, supervision: SupervisorThread) -> None:
    for name in NAMES:
        pid = running.pid(name)
        running.kill(name)
        await_return(running, name, pid)
        assert not exists(pid)


def test_a_log_that_fails_ends_no_supervision(
    running: Supervisor, supervision: SupervisorThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(*_: object, **__: object) -> None:
        failed.set()
        raise BrokenPipeError

    with monkeypatch.context() as patch:
        patch.setattr(supervisor_thread.log, "warning", fail)
        pid = running.pid("shard-0-0")
        running.kill("shard-0-0")
        await_return(running, "shard-0-0", pid)
    assert failed.is_set()


def test_a_step_that_fails_each_time_is_logged_once_with_its_error(
    running: Supervisor,
    supervision: SupervisorThread,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures: list[Exception] = []

    def fail() -> None:
        failures.append(ValueError("no such log"))
        raise failures[-1]

    monkeypatch.setattr(supervisor_thread, "_ROTATE_NS", 0)
    monkeypatch.setattr(running, "rotate_logs", fail)
    wait_until(lambda: len(failures) > 2, "the step is repeated")
    [line] = [one.getMessage() for one in caplog.records if one.exc_info]
    assert line.endswith("it goes on: ValueError('no such log')")


def test_a_node_that_the_handler_cannot_reach_is_replaced(
    running: Supervisor,
    supervision: SupervisorThread,
    handler: FakeHandler,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pids = {name: running.pid(name) for name in NAMES}
    running.pause("shard-0-0")
    handler.orders = [Order("shard-0-0", 7), Order("elsewhere", 7)]
    await_return(running, "shard-0-0", pids["shard-0-0"])
    assert not exists(pids["shard-0-0"])
    assert [running.pid(name) for name in NAMES[:2]] == [pids[name] for name in NAMES[:2]]
    assert "shard-0-0 is running but unreachable" in caplog.text
    assert "recovery 7" in caplog.text


def test_replies_that_take_longer_than_the_next_query_count(
    running: Supervisor,
    supervision: SupervisorThread,
    handler: FakeHandler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restart_policy, "UNREACHABLE_NS", 0)
    pid = running.pid("shard-0-0")
    handler.behind = 3
    handler.orders = [Order("shard-0-0", 7)]
    await_return(running, "shard-0-0", pid)


def test_replies_that_are_out_of_date_kill_no_node(
    running: Supervisor, handler: FakeHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart_policy, "UNREACHABLE_NS", 0)
    monkeypatch.setattr(restart_policy, "MIN_START_NS", 0)
    monkeypatch.setattr(supervisor_thread, "_LATE_NS", 0)
    handler.behind = 3
    handler.orders = [Order("shard-0-0", 7)]
    pid = running.pid("shard-0-0")
    found = SupervisorThread(running)
    wait_until(lambda: handler.asked >= 6, "it asks again")
    found.stop()
    assert running.pid("shard-0-0") == pid


def test_garbage_and_late_replies_kill_no_node(
    running: Supervisor,
    supervision: SupervisorThread,
    handler: FakeHandler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(restart_policy, "UNREACHABLE_NS", 0)
    pid = running.pid("shard-0-0")
    handler.garbage = [b"\xc1", encode(OrdersQuery(0, 1))]
    handler.offset = -1000
    handler.orders = [Order("shard-0-0", 7)]
    asked = handler.asked
    wait_until(lambda: handler.asked >= asked + 3, "it asks again")
    assert running.pid("shard-0-0") == pid
    wait_until(lambda: "sent an invalid message" in caplog.text, "it is logged")
    handler.offset = 0
    await_return(running, "shard-0-0", pid)


def test_a_crash_loop_is_logged_and_slows_down(
    directory: Path,
    running: Supervisor,
    supervision: SupervisorThread,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rewrite(directory, "mms", "raise SystemExit('cannot go on')")
    running.kill("mms-0")
    wait_until(lambda: "starting again in 1.6 s" in caplog.text, "it slows down")
    assert [record.getMessage() for record in caplog.records] == [
        "mms-0 ended (signal 9); starting again in 0.2 s",
        *(
            f"mms-0 ended (exit code 1; cannot go on); starting again in {pause} s"
            for pause in ("0.4", "0.8", "1.6")
        ),
    ]


def test_a_machine_that_can_start_no_process_is_tried_again(
    running: Supervisor,
    supervision: SupervisorThread,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    pid = running.pid("mms-0")
    with monkeypatch.context() as full:
        full.setattr(child_processes, "_spawn", refuse)
        running.kill("mms-0")
        wait_until(lambda: "cannot start mms-0" in caplog.text, "it is tried")
    await_return(running, "mms-0", pid)


def test_the_servers_of_a_new_shard_are_started_and_supervised(
    running: Supervisor, supervision: SupervisorThread, handler: FakeHandler
) -> None:
    pids = {name: running.pid(name) for name in NAMES}
    new_shard.next_shard(running.path, {0})
    await_start(running, "shard-1-0")
    pid = running.pid("shard-1-0")
    running.kill("shard-1-0")
    await_return(running, "shard-1-0", pid)
    pid = running.pid("shard-1-0")
    handler.orders = [Order("shard-1-0", 7)]
    await_return(running, "shard-1-0", pid)
    assert {name: running.pid(name) for name in NAMES} == pids
    supervision.stop()
    running.kill("shard-1-0")


def test_a_damaged_cluster_file_is_logged_once_and_stops_nothing(
    running: Supervisor, supervision: SupervisorThread, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> int:
        return caplog.text.count(NOT_TAKEN)

    text = running.path.read_text()
    replace_file(running.path, text + "[[shard")
    wait_until(lambda: told() == 1, "the damaged file is logged")
    pid = running.pid("mms-0")
    running.kill("mms-0")
    # Meanwhile it polls again, and continues its work.
    await_return(running, "mms-0", pid)
    assert told() == 1
    running.path.unlink()
    wait_until(lambda: told() == 2, "the missing file is logged")
    replace_file(running.path, text)
    new_shard.next_shard(running.path, {0})
    await_start(running, "shard-1-0")
    assert told() == 2
    supervision.stop()
    running.kill("shard-1-0")


def test_a_changed_setting_is_logged_once(
    running: Supervisor, supervision: SupervisorThread, caplog: pytest.LogCaptureFixture
) -> None:
    text = running.path.read_text()
    assert "epoch_ms = 10\n" in text
    replace_file(running.path, text.replace("epoch_ms = 10\n", "epoch_ms = 20\n"))
    said = "a change of epoch_ms needs `ziplog restart --rolling`"
    wait_until(lambda: said in caplog.text, "the change is logged")
    supervision.stop()
    assert caplog.text.count("the cluster file has changed") == 1


def test_a_cluster_file_that_the_system_refuses_is_read_later(
    running: Supervisor,
    supervision: SupervisorThread,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(path: Path) -> None:
        error = OSError(errno.EMFILE, "Too many open files")
        raise ConfigError("cluster file", str(path), "a readable file") from error

    with monkeypatch.context() as full:
        full.setattr(supervisor, "load", refuse)
        new_shard.next_shard(running.path, {0})
        wait_until(lambda: NOT_TAKEN in caplog.text, "it is tried")
    await_start(running, "shard-1-0")
    supervision.stop()
    running.kill("shard-1-0")


def test_a_cluster_file_that_becomes_readable_is_read(
    running: Supervisor,
    supervision: SupervisorThread,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(path: Path) -> None:
        error = PermissionError(errno.EACCES, "Permission denied")
        raise ConfigError("cluster file", str(path), "a readable file") from error

    with monkeypatch.context() as denied:
        denied.setattr(supervisor, "load", refuse)
        new_shard.next_shard(running.path, {0})
        wait_until(lambda: NOT_TAKEN in caplog.text, "it is tried")
    running.path.chmod(0o640)
    await_start(running, "shard-1-0")
    supervision.stop()
    running.kill("shard-1-0")


def test_a_cluster_file_is_taken_when_it_is_written_to_its_end(
    running: Supervisor,
    supervision: SupervisorThread,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Many editors save in place; each poll finds one more line."""
    before = running.path.read_text()
    added = ShardConfig(1, (NodeConfig("shard-1-0", "127.0.0.1", 7405),))
    lines = iter([*before.splitlines(keepends=True), *dump_shard(added).splitlines(keepends=True)])
    check = supervision._check_cluster_file

    def check_while_it_grows() -> None:
        with running.path.open("a") as file:
            file.write(next(lines, ""))
        check()

    def begin() -> None:
        running.path.write_text("")
        monkeypatch.setattr(supervision, "_check_cluster_file", check_while_it_grows)
        check()

    monkeypatch.setattr(supervision, "_check_cluster_file", begin)
    await_start(running, "shard-1-0")
    assert next(lines, None) is None
    assert NOT_TAKEN not in caplog.text
    supervision.stop()
    running.kill("shard-1-0")


def test_a_new_node_that_cannot_be_started_is_tried_again(
    running: Supervisor,
    supervision: SupervisorThread,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as full:
        full.setattr(child_processes, "_spawn", refuse)
        new_shard.next_shard(running.path, {0})
        wait_until(lambda: "cannot start shard-1-0" in caplog.text, "it is tried")
    await_start(running, "shard-1-0")
    supervision.stop()
    running.kill("shard-1-0")


def test_a_stop_in_the_middle_of_a_start_leaves_no_process(
    directory: Path,
    running: Supervisor,
    supervision: SupervisorThread,
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
        running.stop(timeout_s=2.0)

    monkeypatch.setattr(running, "start", slow_start)
    running.kill("mms-0")
    assert is_starting.wait(20)
    stopper = threading.Thread(target=stop)
    stopper.start()
    wait_until(supervision._stopped.is_set, "it is being stopped")
    is_stopping.set()
    stopper.join()
    assert processes_of(directory) == set()
    supervision.stop()


def test_many_threads_may_control_one_node(
    directory: Path, running: Supervisor, supervision: SupervisorThread
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
    running.stop(timeout_s=2.0)
    assert processes_of(directory) == set()
