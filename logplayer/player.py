"""A player in a thread of this program.

It runs the player's node on the driver of the log's servers, and each target in a thread of its own
(`workers`). It does not survive `os.fork`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import ziplog
from logplayer import exposition
from logplayer.calls import FailureCall, PositionsCall, StartedCall, StatusCall, StopCall, WaitCall
from logplayer.contract import cursor_name
from logplayer.new_cursors import check_start
from logplayer.node import PlayerNode
from logplayer.options import PlayerOptions, check_targets
from logplayer.push.messages import decode_any
from logplayer.seeks import check_seek
from logplayer.settings import PlayerSettings
from logplayer.workers import Workers
from ziplog import event_log
from ziplog.client import arguments, cursor_arguments, placement_arguments
from ziplog.client.engines.archive_requests import ArchiveRequests
from ziplog.core.node import AskArchive, Call, Cancelled, Complete
from ziplog.core.units import NEVER, NS_PER_S
from ziplog.errors import ClosedError, ConfigError, DeadlineError, ZiplogError
from ziplog.runtime.clock import now_ns
from ziplog.runtime.driver import Driver
from ziplog.runtime.node_thread import NodeThread
from ziplog.runtime.transport import Transport
from ziplog.runtime.waiting import Latch
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from logplayer.contract import Map, TargetSpec
    from logplayer.options import OnFailed
    from ziplog.client.asynchronous import AsyncLog
    from ziplog.client.common.requests import Request

    Start = RecordId | Callable[[ziplog.Log], RecordId]

#: Default time limit of `stop`, in seconds.
_STOP_S: Final = 30.0
#: Time that targets get to close after the player has stopped, at least, in seconds.
_CLOSE_S: Final = 1.0
#: Time after a deadline until the player's thread counts as stuck, in seconds.
_STUCK_S: Final = 5.0
#: Time of a start in which targets are compared with the log, at most.
_CHECK_NS: Final = 2 * NS_PER_S
#: Maximum length of the host name in the owner's text of a cursor.
_MAX_HOST: Final = 200


class Player:
    """Delivers the records of a log to targets. Start it, or use it in a `with` statement."""

    def __init__(
        self,
        log: ziplog.Log | AsyncLog | str | Sequence[str],
        name: str,
        targets: Sequence[TargetSpec],
        *,
        start: Start = RID_GENESIS,
        lease_s: float = 10.0,
        memory_bytes: int = 64 * 1024 * 1024,
        commit_ms: int = 1000,
        idle_ms: int = 10_000,
        hold_s: int = 604_800,
        region: str | None = None,
        on_failed: OnFailed = "stay",
        map: Map | None = None,  # noqa: A002 - its name in targets and files
    ) -> None:
        """Check the arguments; nothing is connected before `start`.

        Args:
            log: a client of the log, from which only the addresses are taken; or the log's
                membership nodes as for `ziplog.connect`.
            name: 1 to 48 letters, digits, '.', '_' or '-'. All processes of a player have the same
                name, and the same targets; they share the tasks.
            targets: what `logplayer.targets` returns, with 1 to 256 tasks.
            start: the first position of cursors that do not exist yet; RID_RECENT: after the last
                record. Or a function that finds it with a client.
            lease_s: silence of a process after which others take over its tasks, 1 to 300 seconds.
            memory_bytes: memory for the records that the tasks share, from 1 MiB on.
            commit_ms: maximum time between a step of a target and the move of its cursor, 10 to
                60,000 milliseconds.
            idle_ms: time without a record of its own after which a task passes records of other
                tasks, 100 to 3,600,000 milliseconds.
            hold_s: time without use after which the player's cursors no longer keep records from
                trims, in seconds; 0: they keep none.
            region: the region of this process, so that it reads near. None: the one in the
                environment variable ZIPLOG_REGION, or none.
            on_failed: "exit": `join` returns once a task of this process has failed, which no
                further attempt mends. "stay": it waits; the other tasks go on in both cases.
            map: the `map` of the targets that have none of their own: a pure function of a record
                that returns a record, a list of records or None.

        Raises:
            ConfigError: an argument is invalid.
            TypeError: an argument is of another type.

        """
        self._endpoints: Final = arguments.endpoints_of(log)
        self._region: Final = placement_arguments.region(region)
        self._options: Final = PlayerOptions(
            name, lease_s, memory_bytes, commit_ms, idle_ms, hold_s, on_failed
        )
        self._targets: Final = check_targets(targets, map)
        if not callable(start):
            cursor_arguments.check_position("start", start)
        self._start: Final = start
        self._process: Final = os.getpid()
        self._numbers: Final = itertools.count(1)
        #: Held while calls are added, and while all of them end.
        self._lock: Final = threading.RLock()
        #: By number: the calls of this program that the node has not answered.
        self._calls: Final[dict[int, _PendingCall | _PendingStop]] = {}
        self._workers: Final = Workers(self._targets, self._post)
        self._archives: Final = ArchiveRequests(self._on_archive_reply)
        #: Runs the node; None: it does not run yet.
        self._thread: NodeThread | None = None
        #: `start` was called; it must not start any more; its stop is over.
        self._was_started = self._is_stopped = self._has_ended = False
        self._failure: ZiplogError | None = None
        self._failed_tasks: dict[str, str] = {}
        #: The thread has ended.
        self._ended: Final = Latch()

    def __enter__(self) -> Self:
        """Start the player, and return it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the player."""
        self.stop()

    def __repr__(self) -> str:
        return f"<logplayer.Player {self.name} on {','.join(self._endpoints)}>"

    @property
    def name(self) -> str:
        """The player's name."""
        return self._options.name

    @property
    def targets(self) -> tuple[TargetSpec, ...]:
        """Its targets."""
        return self._targets

    @property
    def endpoints(self) -> list[str]:
        """The membership nodes of its log, "host:port"."""
        return self._endpoints

    @property
    def failed_tasks(self) -> dict[str, str]:
        """The failed tasks for which `join` returned, with on_failed="exit": why, by cursor."""
        return dict(self._failed_tasks)

    # --- start and stop ---

    def start(self, timeout: float | None = None) -> None:
        """Start; return once the first claims of tasks were answered.

        Targets may still be opening then: one that cannot be reached is tried again.

        Args:
            timeout: in seconds; 10 if None.

        Raises:
            ClosedError: it was started before.
            UnavailableError: the log does not reply in time.
            ConfigError: the log has another player of this name, with other partitions; or a target
                is the log itself.
            TrimmedError: a task has no cursor yet, and records from `start` on were trimmed.

        """
        try:
            self.start_interruptible(timeout)
        except Exception:
            raise
        except BaseException:  # A signal, which must not leave tasks that it has claimed.
            with contextlib.suppress(ZiplogError):
                self.stop()
            raise

    def start_interruptible(self, timeout: float | None = None) -> None:
        """Start as `start` does; but after a signal handler has raised, `stop` must follow."""
        seconds = arguments.timeout_s(timeout, arguments.DEFAULT_TIMEOUT_S)
        deadline_ns = arguments.deadline_ns(timeout, seconds)
        with self._lock:
            if self._was_started or self._is_stopped:
                state = "closed" if self._is_stopped else "running"
                raise ClosedError("this player", "a player starts once; make another one", state)
            self._was_started = True
        try:
            # A client's errors say why a log cannot be reached.
            with ziplog.connect(self._endpoints, timeout=seconds) as log:
                found = self._start(log) if callable(self._start) else self._start
                check_start(log, self.name, self._targets, found)
                self._check_sources(log.cluster_number)
            with self._lock:  # A stop waits, so that it finds a thread that it can stop, or none.
                self._begin(found)
            self._call(StartedCall(deadline_ns))
        except ClosedError:
            self._ended.wait(_STOP_S)  # Another thread stops it, and releases its tasks.
            self._end(0)
            raise
        except Exception:
            self._end(0)
            raise

    def _check_sources(self, cluster: int) -> None:
        """Raise ConfigError if a target is the log itself."""
        until = now_ns() + _CHECK_NS
        for spec in self._targets:
            left_s = (until - now_ns()) / NS_PER_S
            if spec.check_source is not None and left_s > 0:
                try:
                    spec.check_source(cluster, left_s)
                except ConfigError:
                    raise
                except ZiplogError:
                    pass  # Its tasks report that it cannot be reached, and compare it later.

    def _begin(self, start: RecordId) -> None:
        """Run the node; `start`: the position of new cursors."""
        if self._is_stopped:  # Meanwhile: it must claim nothing any more.
            raise ClosedError("this player", "make another one to continue")
        options, client = self._options, os.urandom(16)
        settings = PlayerSettings(
            name=options.name,
            targets=self._targets,
            start=start,
            lease_ms=int(options.lease_s * 1000),
            memory_bytes=options.memory_bytes,
            commit_ms=options.commit_ms,
            idle_ms=options.idle_ms,
            hold_s=options.hold_s,
        )
        owner = f"{socket.gethostname()[:_MAX_HOST]}:{os.getpid()}:{client[:4].hex()}"
        node = PlayerNode(
            client,
            self._endpoints,
            settings,
            owner=owner,
            now=now_ns(),
            region=self._region,
        )
        transport = Transport()
        driver = Driver(
            node,
            transport,
            carry_out={
                Complete: self._complete,
                AskArchive: self._archives.start,
                **self._workers.effects,
            },
            decode=decode_any,
            on_halt=lambda reason, state: self._on_halt(node, reason, state),
        )
        self._thread = NodeThread(f"player {self.name}", driver, transport, self._on_end)
        self._thread.start("cannot run a player")

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the player has stopped, or with on_failed="exit" until a task has failed.

        A task that failed ends no other one: call `stop`. It is in `failed_tasks` and `status`.

        Args:
            timeout: in seconds; None: without limit.

        Returns:
            False at the time-out, else True.

        Raises:
            ZiplogError: the player itself failed.

        """
        self._check_started()
        if self._options.on_failed == "exit":
            deadline_ns = NEVER if timeout is None else arguments.deadline_ns(timeout, timeout)
            try:
                self._failed_tasks = self._call(FailureCall(deadline_ns))
            except DeadlineError:
                return False
            except ClosedError:  # It stops.
                timeout = None if timeout is None else max(deadline_ns - now_ns(), 0) / NS_PER_S
            else:
                return True
        if not self._ended.wait(timeout):
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def stop(self, timeout: float | None = None) -> None:
        """Finish the steps under way, commit the positions, release the tasks. Idempotent.

        In a forked child it does nothing. A target's own function may call it: then it returns at
        once, since the step under way is the one that calls, and `join` waits for the end.

        Args:
            timeout: in seconds; 30 if None.

        Raises:
            DeadlineError: a target did not return in time; its task is free for others after
                `lease_s`.

        """
        if os.getpid() != self._process:
            return
        deadline_ns = arguments.deadline_ns(timeout, _STOP_S)
        with self._lock:
            self._is_stopped = True
        if not self._was_started or self._has_ended:
            return
        if self.is_in_target:
            self._stop_later(deadline_ns)
            return
        late: DeadlineError | None = None
        try:
            if not self._ended.is_set():
                self._call(StopCall(deadline_ns))
        except DeadlineError as error:
            late = error
        except ClosedError:
            pass  # Another thread stops it, too, and was first.
        except ZiplogError as error:
            event_log.warning("the player failed while it stopped", error=str(error))
        finally:
            self._end(max((deadline_ns - now_ns()) / NS_PER_S, _CLOSE_S))
        if late is not None:
            raise late
        if self._workers.running:
            names = ", ".join(self._workers.running)
            raise DeadlineError(f"these targets did not close in time: {names}")

    @property
    def is_in_target(self) -> bool:
        """Whether this thread runs a step of a target of this player."""
        return self._workers.has_current_thread

    def _stop_later(self, deadline_ns: int) -> None:
        """Begin to stop; the reply ends the node's thread."""
        assert self._thread is not None, "a step ran before the player"
        number = next(self._numbers)
        with self._lock:
            if self._ended.is_set():
                return
            self._calls[number] = _PendingStop(self._thread)
        self._post(Call(number, StopCall(deadline_ns)))

    def _end(self, timeout_s: float) -> None:
        """End the threads; wait for those of the targets at most for `timeout_s`."""
        self._is_stopped = True
        if self._thread is not None:
            self._thread.stop(max(timeout_s, _STUCK_S))
        else:
            self._ended.set()
        if self._ended.is_set():  # Else the thread is stuck; it ends the workers once it goes on.
            self._workers.stop(timeout_s)
        self._has_ended = True

    # --- the thread of the node ---

    def _on_end(self) -> None:
        """End the calls that wait, and the workers."""
        error = self._failure or ClosedError("this player", "make another one to continue")
        with self._lock:
            self._ended.set()
            calls = list(self._calls.values())
            self._calls.clear()
        for call in calls:
            call.complete(error)
        self._workers.stop(0)

    def _post(self, event: Any) -> None:
        assert self._thread is not None, "a worker ran before the player"
        self._thread.post(event)

    def _on_archive_reply(self) -> None:
        """Post a reply; it is called once for each of them."""
        self._post(Call(next(self._numbers), self._archives.replies.popleft()))

    def _on_halt(self, node: PlayerNode, reason: str, state: str) -> None:
        """Record that the node stopped; the program around it continues."""
        self._failure = node.failure or ZiplogError(f"the player failed: {reason}")
        if node.failure is None:  # Else the settings are wrong, which the caller learns.
            event_log.error("player stopped", reason=reason, state=state[:8192])

    def _complete(self, effect: Complete) -> None:
        call = self._calls.pop(effect.id, None)
        if call is not None:
            call.complete(effect.result)

    def _call(self, request: Request) -> Any:
        """Return the node's result of a call; raise its error."""
        self._check_started()
        number, call = next(self._numbers), _PendingCall()
        with self._lock:
            if self._ended.is_set():
                raise self._failure or ClosedError("this player", "make another one to continue")
            self._calls[number] = call
        self._post(Call(number, request))
        try:
            return call.result(request.deadline)
        finally:
            if self._calls.pop(number, None) is not None:  # The wait was interrupted.
                self._post(Cancelled(number))

    def _check_started(self) -> None:
        if os.getpid() != self._process:
            raise ClosedError("this player", "it runs in the parent; make another one here")
        if self._thread is None:
            if self._is_stopped:
                raise ClosedError("this player", "make another one to continue")
            raise ClosedError("this player", "start it first", "not started")

    # --- what it does, and operators' changes ---

    def status(self, timeout: float | None = None) -> dict[str, Any]:
        """Return what this process knows of the player, for people and monitors.

        Args:
            timeout: in seconds; 10 if None.

        Raises:
            ClosedError: the player does not run.

        """
        deadline_ns = arguments.deadline_ns(timeout, arguments.DEFAULT_TIMEOUT_S)
        document: dict[str, Any] = self._call(StatusCall(deadline_ns, time.time_ns()))
        return document

    def metrics(self, timeout: float | None = None) -> str:
        """Return the metrics of this process in Prometheus' text format (docs/player.md, 12).

        Arguments and errors are those of `status`.
        """
        return exposition.text(self.status(timeout))

    def wait_until(self, position: RecordId, timeout: float | None = None) -> None:
        """Wait until all tasks have delivered, and committed, what is at or below a position.

        Tasks of other processes count as well. Tasks that are paused or have failed do not move.

        Args:
            position: for example, the last record's that is of interest.
            timeout: in seconds; None: without limit.

        Raises:
            ClosedError: the player does not run, or stopped meanwhile.
            DeadlineError: a task has not got so far in time.

        """
        arguments.check_rid("position", position)
        deadline_ns = NEVER if timeout is None else arguments.deadline_ns(timeout, timeout)
        self._call(WaitCall(deadline_ns, position.gsn + 1))

    def pause(self, target: str | None = None) -> None:
        """Pause the tasks of a target, or of all, wherever they run; the player need not run.

        Their owners learn of it within a third of the lease, and finish the step under way.

        Raises:
            ConfigError: there is no such target, or it has no cursors yet.
            UnavailableError: the log does not reply.

        """
        names = self._cursors(target)
        with ziplog.connect(self._endpoints) as log:
            for name in names:
                log.pause_cursor(name)

    def resume(self, target: str | None = None) -> None:
        """End a pause; a task that had failed is tried again. Errors are those of `pause`."""
        names = self._cursors(target)
        with ziplog.connect(self._endpoints) as log:
            for name in names:
                log.resume_cursor(name)

    def seek(self, target: str, position: RecordId) -> None:
        """Set the position of a target's tasks, forward or back.

        Args:
            target: a target's name.
            position: RID_GENESIS: the first position that is not trimmed; RID_RECENT: behind the
                last record.

        Raises:
            ConfigError: there is no such target, or it has no cursors yet; it is a mirror; or its
                files may have records from the position on.
            NoSuchRecordError: no shard owns the position yet.
            UnavailableError: the log does not reply.

        """
        names = self._cursors(target)
        position = cursor_arguments.check_position("position", position)
        with ziplog.connect(self._endpoints) as log:
            for spec in self._targets:
                if spec.name == target and spec.seeks != "anywhere":
                    check_seek(self.name, log, spec, self._reached(), position)
            for name in names:
                log.seek_cursor(name, position)

    def _reached(self) -> dict[str, int]:
        """Return how far the tasks of this process are, by their cursors."""
        found: dict[str, int] = {}
        with contextlib.suppress(ZiplogError):  # The player does not run, and has no tasks.
            found = self._call(PositionsCall(NEVER))
        return found

    def _cursors(self, target: str | None) -> list[str]:
        """Return the names of a target's cursors; None: of all targets."""
        chosen = [spec for spec in self._targets if target in {None, spec.name}]
        if not chosen:
            names = " or ".join(repr(spec.name) for spec in self._targets)
            raise ConfigError("target", target, f"{names}, or None")
        return [
            cursor_name(self.name, spec.name, partition)
            for spec in chosen
            for partition in range(spec.partitions)
        ]


class _PendingCall:
    """A call that a thread waits for."""

    __slots__ = ("_is_done", "_result")

    def __init__(self) -> None:
        self._is_done: Final = Latch()
        self._result: Any = None

    def complete(self, result: Any) -> None:
        self._result = result
        self._is_done.set()

    def result(self, deadline_ns: int) -> Any:
        left_s = None
        if deadline_ns != NEVER:
            left_s = max(deadline_ns - now_ns(), 0) / NS_PER_S + _STUCK_S
        if not self._is_done.wait(left_s):
            why = "its thread is stuck, as in a `map` that does not return"
            raise DeadlineError(f"the player did not answer: {why}")
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class _PendingStop:
    """A stop that no thread waits for."""

    __slots__ = ("_thread",)

    def __init__(self, thread: NodeThread) -> None:
        self._thread: Final = thread

    def complete(self, result: Any) -> None:
        """End the player's thread, which calls this."""
        if isinstance(result, DeadlineError):
            event_log.warning("the player stopped late", error=str(result))
        self._thread.stop()
