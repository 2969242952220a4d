"""A coordinator in a thread of this program, listening on loopback.

It runs the node and driver of `python -m logdb`. Other processes may use its `endpoint` while the
program runs. It does not survive `os.fork`.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

import ziplog
from logdb.coordinator.metrics import CoordinatorMetrics
from logdb.coordinator.node import CoordinatorNode, Settings
from logdb.wire import decode
from ziplog import event_log
from ziplog.client import arguments, placement_arguments
from ziplog.config import require_loopback
from ziplog.errors import ConfigError, DeadlineError, ZiplogError
from ziplog.runtime.clock import now_ns
from ziplog.runtime.driver import Driver
from ziplog.runtime.metrics import Reporter
from ziplog.runtime.node_thread import NodeThread
from ziplog.runtime.transport import Transport
from ziplog.runtime.waiting import Latch
from ziplog.version import version
from ziplog.wire.node_info import VERSIONS, NodeInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Self

    from logdb.client.blocking import Database

_HOST: Final = "127.0.0.1"
_STOP_S: Final = 10.0
#: What the option `insecure` allows.
_INSECURE_MEANS: Final = (
    "is given, which allows every program that reaches the port to read and write all data"
)


class Coordinator:
    """A running coordinator of a log. Close it, or use it in a `with` statement."""

    def __init__(
        self,
        log: ziplog.Log | str | Sequence[str],
        *,
        host: str = _HOST,
        port: int = 0,
        insecure: bool = False,
        checkpoints: bool = True,
        checkpoint_every: int = 100_000,
        cache_mb: int = 64,
        connect_timeout: float | None = None,
        ready_timeout: float | None = None,
    ) -> None:
        """Start a coordinator, and wait until it has replayed the log.

        Args:
            log: a client of the log, from which only the addresses are taken, so it may be closed
                afterwards; or the log's membership nodes as for `ziplog.connect`.
            host: the address to listen on.
            port: the port to listen on; 0: any free port.
            insecure: whether other machines may reach it, and all data.
            checkpoints: whether it writes checkpoints and trims the log.
            checkpoint_every: records between two checkpoints; at least as many as there are keys.
            cache_mb: size of the cache of small values, in MiB.
            connect_timeout: timeout for reaching the log, in seconds; 10 if None.
            ready_timeout: timeout of the replay, in seconds; None: no timeout.

        Raises:
            ConfigError: an argument is invalid, for example a `host` that is not loopback.
            TypeError: `log` is neither a client nor addresses.
            UnavailableError: the port is in use, or the log does not reply.
            TrimmedError: the log's beginning was trimmed, and it holds no checkpoint.
            DeadlineError: the replay took longer than `ready_timeout`.

        """
        endpoints = arguments.endpoints_of(log)
        bind = bind_address(host, port, insecure=insecure)
        chosen = coordinator_settings(
            checkpoints=checkpoints,
            checkpoint_every=checkpoint_every,
            cache_mb=cache_mb,
            connect_timeout=connect_timeout,
        )
        timeout_ns = None if ready_timeout is None else _timeout_ns("ready_timeout", ready_timeout)
        deadline = None if timeout_ns is None else time.monotonic() + timeout_ns / 1e9
        here = placement_arguments.preferences(None, None, None)
        transport = Transport(bind=bind)
        endpoint = transport.endpoint
        assert endpoint is not None, "a bound transport has no endpoint"
        #: The address it listens on, "host:port".
        self.endpoint: Final = endpoint
        self._process: Final = os.getpid()
        self._failure: ZiplogError | None = None
        #: The coordinator is ready, or has failed.
        self._ready_or_failed: Final = Latch()
        self._node: Final = CoordinatorNode(
            os.urandom(16),
            endpoints,
            here.policy,
            now=now_ns(),
            endpoint=endpoint,
            settings=chosen,
            region=here.region,
        )
        self._node.on_ready = self._ready_or_failed.set
        driver = Driver(
            self._node,
            transport,
            decode=decode,
            describe=coordinator_info(self._node, endpoint, endpoints),
            report=coordinator_reporter(self._node, transport),
            on_halt=self._on_halt,
        )
        self._thread: Final = NodeThread("logdb", driver, transport, self._ready_or_failed.set)
        self._thread.start("cannot run a coordinator")
        try:
            self._wait(deadline)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return the coordinator."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.close()

    def __repr__(self) -> str:
        return f"<logdb.Coordinator at {self.endpoint}>"

    @property
    def failure(self) -> ZiplogError | None:
        """The error that stopped it; None: it runs, or was closed."""
        return self._failure

    def _wait(self, deadline: float | None) -> None:
        remaining_s = None if deadline is None else max(deadline - time.monotonic(), 0)
        if not self._ready_or_failed.wait(remaining_s):
            raise DeadlineError(
                "timed out waiting for the coordinator to replay the log: it is"
                f" {self._node.tailer.progress}; increase ready_timeout"
            )
        if self._failure is not None:
            raise self._failure

    def _on_halt(self, reason: str, state: str) -> None:
        """Record that the node stopped; the program around it continues."""
        if self._failure is not None:
            return
        if self._node.failure is not None:
            self._failure = self._node.failure
            event_log.error("coordinator stopped", reason=reason)
        else:
            self._failure = ZiplogError(f"the coordinator failed: {reason}")
            event_log.error("coordinator stopped", reason=reason, state=state[:8192])

    def close(self) -> None:
        """Stop it. Idempotent; the outcome of open transactions may be unknown.

        In a forked child it does nothing.
        """
        if os.getpid() != self._process:
            return
        self._thread.stop(_STOP_S)


def bind_address(host: str, port: int, *, insecure: bool, are_options: bool = False) -> str:
    """Return the address to listen on, "host:port".

    Raises:
        ConfigError: the port is invalid, or other machines could reach it without `insecure`.

    """
    if not isinstance(port, int) or not 0 <= port < 2**16:
        allowed = "a number from 0 to 65535; 0: any free port"
        raise ConfigError("--port" if are_options else "port", port, allowed)
    require_loopback(
        host,
        insecure=insecure,
        name="--host" if are_options else "host",
        unless=f"{'--insecure' if are_options else 'insecure=True'} {_INSECURE_MEANS}",
    )
    return f"{host}:{port}"


def coordinator_info(
    node: CoordinatorNode, endpoint: str, mms: list[str]
) -> Callable[[int], NodeInfo]:
    """Return the function that describes a coordinator, for a request's number."""
    return lambda request: NodeInfo(
        node.cluster, request, "coordinator", endpoint, "", version(), *VERSIONS, mms
    )


def coordinator_reporter(node: CoordinatorNode, transport: Transport) -> Reporter:
    """Return the function that reports the metrics of a coordinator and its process."""
    metrics = CoordinatorMetrics(node)
    return Reporter(
        transport,
        lambda _driver, now: metrics.collect(now, time.time_ns()),
        lambda: node.cluster,
    )


def coordinator_settings(
    *,
    checkpoints: bool,
    checkpoint_every: int,
    cache_mb: int,
    connect_timeout: float | None,
    are_options: bool = False,
) -> Settings:
    """Return settings from the arguments of `Coordinator` or the options of the process.

    Raises:
        ConfigError: a value is invalid; the error has the name of the argument or option.

    """

    def name(argument: str) -> str:
        return f"--{argument.replace('_', '-')}" if are_options else argument

    for argument, given, low in (
        ("checkpoint_every", checkpoint_every, 1),
        ("cache_mb", cache_mb, 0),
    ):
        if not isinstance(given, int) or given < low:
            raise ConfigError(name(argument), given, f"a whole number from {low} on")
    return Settings(
        checkpoints=checkpoints,
        checkpoint_every=checkpoint_every,
        cache_bytes=cache_mb * 1024 * 1024,
        connect_ns=_timeout_ns(name("connect_timeout"), connect_timeout),
    )


def _timeout_ns(name: str, given: float | None) -> int:
    """Return a timeout in nanoseconds; see `ziplog.client.arguments.timeout_s`."""
    try:
        return int(arguments.timeout_s(given, arguments.DEFAULT_TIMEOUT_S) * 1e9)
    except (ConfigError, OverflowError):
        raise ConfigError(name, given, "seconds from 0 on, or None for the default") from None


def local(
    log: ziplog.Log | str | Sequence[str], *, timeout: float | None = None, **options: Any
) -> Database:
    """Return a database on a log, with its own coordinator in this program.

    Args:
        log: as for `Coordinator`.
        timeout: the database's default timeout, in seconds; 10 if None.
        options: arguments of `Coordinator`.

    Raises:
        ZiplogError: the errors of `Coordinator` and `connect`.

    """
    # A coordinator needs no client.
    from logdb.client import blocking, engines  # noqa: PLC0415

    coordinator = Coordinator(log, **options)
    try:
        engine = engines.DatabaseEngine(coordinator.endpoint, timeout, coordinator.close)
        return blocking.connect(engine)
    except BaseException:
        coordinator.close()
        raise
