"""Supervisor thread: restarts the dead and unreachable processes of a cluster.

It checks the processes ten times a second and queries the failure handlers for unreachable nodes;
`ziplog.deploy.restart_policy` decides what follows. It also watches the cluster file, and starts
the servers of added shards. Every start and kill is logged as a warning. Rule: it acts only through
the supervisor's lock. Invariant: after `stop` it does nothing more. See docs/protocol.md, sections
11 and 13 (joining).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from ziplog.config_changes import needs_of
from ziplog.core.units import NS_PER_S
from ziplog.deploy.restart_policy import Death, RestartPolicy
from ziplog.errors import ConfigError, ProtocolError, UnavailableError
from ziplog.runtime.descriptors import start_thread
from ziplog.runtime.transport import Transport
from ziplog.segments.entry import SCARCE
from ziplog.wire import Orders, OrdersQuery, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.deploy.supervisor import Supervisor

log = logging.getLogger(__name__)

_POLL_NS: Final = NS_PER_S // 10
#: Interval between queries to the failure handlers; with a failed node, every poll sends one.
_QUERY_NS: Final = NS_PER_S // 2
#: Time after which a reply is out of date. It is less than the age at which a node may be killed.
_LATE_NS: Final = 3 * NS_PER_S
#: Time for which a changed cluster file must stay the same before it is read: some editors write it
#: in parts.
_UNCHANGED_NS: Final = NS_PER_S // 10
#: Interval between checks of the logs' sizes, and the delay after a failed rotation.
_ROTATE_NS: Final = NS_PER_S
_ROTATE_LATER_NS: Final = 60 * NS_PER_S
#: Interval between two reports that a step failed.
_FAILED_AGAIN_NS: Final = 60 * NS_PER_S
#: Delay before a failed start of a new node is retried.
_RETRY_NS: Final = NS_PER_S


class SupervisorThread:
    """Restarts dead nodes, and kills and restarts unreachable ones, until `stop`."""

    def __init__(self, supervisor: Supervisor) -> None:
        """Start the thread.

        Args:
            supervisor: the owner of the processes; it must not be stopped before this thread is.

        """
        self._supervisor: Final = supervisor
        self._restart_policy: Final = RestartPolicy()
        self._transport: Final = Transport()
        self._handlers: Final = [
            handler.name.encode() for handler in supervisor.config.failure_handlers
        ]
        for handler in supervisor.config.failure_handlers:
            self._transport.connect(handler.name.encode(), handler.endpoint)
        #: The last seen version of the cluster file (inode, times and size; a change of its mode
        #: changes a time), and when to read it, if that is still to be done.
        self._file: tuple[int, ...] | None = None
        self._read_at: int | None = None
        self._start_at = 0
        self._rotate_at = 0
        self._request = 0
        self._queried_at = -_QUERY_NS
        #: When each query was sent that has no reply, nor a later one, and is not out of date.
        self._queries: dict[int, int] = {}
        #: By step: until when further failures are not logged.
        self._quiet_until: dict[str, int] = {}
        self._stopped: Final = threading.Event()
        thread = threading.Thread(target=self._run, name="ziplog-supervision", daemon=True)
        try:
            self._thread: Final = start_thread(thread, "cannot supervise the cluster")
        except UnavailableError:
            self._transport.close()
            raise

    def stop(self) -> None:
        """Stop the thread; returns when its last action is done. Idempotent."""
        self._stopped.set()
        self._transport.wake()
        self._thread.join()
        self._transport.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._try(self._check_cluster_file)
            self._try(self._rotate_logs)
            self._try(self._start_new)
            self._try(self._restart_dead)
            self._try(self._query_failure_handlers)
            self._transport.wait(_POLL_NS)
            self._try(self._receive)

    def _try(self, step: Callable[[], None]) -> None:
        """Run a step; no failure ends the thread, also none of a handler of this log.

        A step that fails each time is logged once a minute.
        """
        try:
            step()
        except Exception as error:
            now, name = time.monotonic_ns(), step.__name__
            if now < self._quiet_until.get(name, 0):
                return
            self._quiet_until[name] = now + _FAILED_AGAIN_NS
            with contextlib.suppress(Exception):
                log.warning(
                    "a step of the supervision failed, and it goes on: %r", error, exc_info=True
                )

    def _check_cluster_file(self) -> None:
        file: tuple[int, ...] = ()
        with contextlib.suppress(OSError):
            found = self._supervisor.path.stat()
            file = (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)
        now = time.monotonic_ns()
        if file != self._file:
            self._file, self._read_at = file, now + _UNCHANGED_NS
        if self._read_at is None or now < self._read_at:
            return
        self._read_at = None
        try:
            changed = self._supervisor.reload()
        except ConfigError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in SCARCE:
                self._read_at = now + _RETRY_NS
            log.warning("the cluster file was changed, but the change is ignored: %s", error)
            return
        if changed:
            log.warning("the cluster file has changed: %s", needs_of(changed))

    def _rotate_logs(self) -> None:
        now = time.monotonic_ns()
        if now < self._rotate_at:
            return
        self._rotate_at = now + _ROTATE_NS
        try:
            self._supervisor.rotate_logs()
        except OSError as error:
            self._rotate_at = now + _ROTATE_LATER_NS
            log.warning("cannot rotate the logs now, retrying in a minute: %s", error)

    def _start_new(self) -> None:
        """Start the nodes that were added to the cluster file."""
        supervisor, now = self._supervisor, time.monotonic_ns()
        new = [name for name in supervisor.names if name not in supervisor.processes()]
        if not new or now < self._start_at:
            return
        for name in new:
            log.warning("%s was added to the cluster file; starting it", name)
            try:
                supervisor.start(name)
            except OSError as error:
                _warn(name, error)
                self._start_at = now + _RETRY_NS

    def _restart_dead(self) -> None:
        supervisor = self._supervisor
        for found in self._restart_policy.check_processes(
            supervisor.processes(), time.monotonic_ns()
        ):
            if isinstance(found, Death):
                how = supervisor.how_it_ended(found.node)
                log.warning(
                    "%s %s; starting again in %g s", found.node, how, found.pause_ns / NS_PER_S
                )
                continue
            try:
                supervisor.start(found.node)
            except OSError as error:
                _warn(found.node, error)

    def _query_failure_handlers(self) -> None:
        now = time.monotonic_ns()
        if now - self._queried_at < (_POLL_NS if self._restart_policy.has_failures else _QUERY_NS):
            return
        self._queried_at = now
        self._request += 1
        recent = {one: at for one, at in self._queries.items() if now - at < _LATE_NS}
        self._queries = recent | {self._request: now}
        # Cluster 0: a supervisor does not know the number. Only the leader answers.
        query = encode(OrdersQuery(0, self._request))
        for handler in self._handlers:
            self._transport.send(handler, query)

    def _receive(self) -> None:
        while (received := self._transport.receive()) is not None:
            source, frame = received
            try:
                message = decode(frame)
            except ProtocolError as error:
                log.warning(
                    "%s sent an invalid message: %s", source.decode(errors="replace"), error
                )
                continue
            # With a failed node, a reply may take longer than the time until the next query.
            if isinstance(message, Orders) and self._take_query(message.request):
                self._restart_unreachable(message)

    def _take_query(self, request: int) -> bool:
        """Forget a query and the earlier ones; return whether its reply is up to date."""
        sent_at = self._queries.get(request)
        if sent_at is None:
            return False
        self._queries = {one: at for one, at in self._queries.items() if one > request}
        return time.monotonic_ns() - sent_at < _LATE_NS

    def _restart_unreachable(self, message: Orders) -> None:
        supervisor = self._supervisor
        recoveries = {order.node: order.recovery for order in message.orders}
        now = time.monotonic_ns()
        for name in self._restart_policy.on_unreachable(recoveries, supervisor.processes(), now):
            log.warning(
                "%s is running but unreachable; killing and restarting it for recovery %d",
                name,
                recoveries[name],
            )
            try:
                supervisor.replace(name)
            except UnavailableError as error:
                log.warning("%s; it is started again once it has ended", error)
            except OSError as error:
                _warn(name, error)


def _warn(name: str, error: OSError) -> None:
    """Log a failed start, which is retried, and what the operator can do."""
    log.warning(
        "cannot start %s now; retrying: %s. If the system lacks processes, open files or memory,"
        " stop some programs, or raise the limit (ulimit -u, ulimit -n)",
        name,
        error,
    )
