"""A receiver: a target that players reach over the network (docs/player.md, section 10).

It runs the receiver's node on the driver of the log's servers, and a thread for each task that
calls the target (`workers`). It stores nothing itself, so it may die at any time.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

from logplayer.contract import TargetSpec
from logplayer.push.messages import ROLE, VERSIONS, decode
from logplayer.push.receiver_node import ReceiverNode
from logplayer.workers import Workers
from ziplog import event_log
from ziplog.config import require_loopback
from ziplog.errors import ClosedError, ConfigError, ZiplogError
from ziplog.runtime.driver import Driver
from ziplog.runtime.listener import parse_endpoint
from ziplog.runtime.node_thread import NodeThread
from ziplog.runtime.transport import Transport
from ziplog.runtime.waiting import Latch
from ziplog.version import version
from ziplog.wire import NodeInfo

if TYPE_CHECKING:
    from typing import Self

    from ziplog.core.node import Event

#: Time that targets get to close when the receiver is closed, in seconds.
_CLOSE_S: Final = 5.0
_INSECURE: Final = "insecure=True, which lets any program that reaches the port write to the target"


class Receiver:
    """Receives batches of players, and delivers them to a target. Use it in a `with` statement."""

    def __init__(self, address: str, target: TargetSpec, *, insecure: bool = False) -> None:
        """Check the arguments; nothing listens before `start` or `serve`.

        Args:
            address: where to listen, "host:port"; port 0: any free one.
            target: what `logplayer.targets` returns, with the name and the number of partitions of
                the player's `targets.push`. Batches and pauses are the player's, so those settings
                have no effect here.
            insecure: allow an address that other machines reach.

        Raises:
            ConfigError: the address is invalid, or is not loopback; or the target has `map` or
                `keys`, which belong to the player's target, or is itself a push target.
            TypeError: `target` is not a target.

        """
        if not isinstance(address, str):
            raise ConfigError("address", address, "'host:port'")
        host, _ = parse_endpoint("address", address)
        require_loopback(host, insecure=insecure, name="address", unless=_INSECURE)
        if not isinstance(target, TargetSpec):
            raise TypeError(f"target is {target!r}, not what logplayer.targets returns")
        for setting, value in (("map", target.map), ("keys", target.keys or None)):
            if value is not None:
                allowed = "left out: give it to targets.push in the player"
                raise ConfigError(setting, value, allowed, f"target {target.name}")
        if target.connect is None:
            allowed = "a target that the receiver reaches itself"
            raise ConfigError("target", target.name, allowed)
        self._address: Final = address
        self._target: Final = target
        self._process: Final = os.getpid()
        #: Held while it is started or closed.
        self._lock: Final = threading.Lock()
        self._workers: Final = Workers([target], self._post)
        self._thread: NodeThread | None = None
        self._is_closed = False
        self._failure: ZiplogError | None = None
        #: The thread has ended.
        self._ended: Final = Latch()

    def __enter__(self) -> Self:
        """Start it, and return it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        return f"<logplayer.Receiver of {self._target.name} at {self.endpoint}>"

    @property
    def endpoint(self) -> str:
        """Where it listens, "host:port"; once it is started, with the actual port."""
        found = None if self._thread is None else self._thread.endpoint
        return found or self._address

    def start(self) -> None:
        """Start in a thread of its own; return once it listens.

        Raises:
            ClosedError: it was started before, or is closed.
            UnavailableError: the port is in use.

        """
        with self._lock:
            if self._thread is not None or self._is_closed:
                raise ClosedError("this receiver", "a receiver starts once; make another one")
            transport = Transport(bind=self._address)
            driver = Driver(
                ReceiverNode(self._target),
                transport,
                carry_out=dict(self._workers.effects),
                decode=decode,
                describe=self._describe,
                on_halt=self._on_halt,
            )
            self._thread = NodeThread("receiver", driver, transport, self._on_end)
            self._thread.start("cannot run a receiver")

    def serve(self) -> None:
        """Receive until another thread calls `close`, or until an exception: Ctrl-C, for example.

        Raises:
            ClosedError: it was closed before it started.
            UnavailableError: the port is in use.
            ZiplogError: the receiver itself failed.

        """
        if self._thread is None:
            self.start()
        try:
            self._ended.wait()
        except BaseException:
            self.close()
            raise
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop, and wait up to 5 seconds until the targets have closed. Idempotent.

        A player repeats the steps that were under way. In a forked child it does nothing.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            self._is_closed = True
        if self._thread is not None:
            self._thread.stop()
            self._workers.stop(_CLOSE_S)

    def _on_end(self) -> None:
        self._workers.stop(0)
        self._ended.set()

    def _post(self, event: Event) -> None:
        assert self._thread is not None, "a worker ran before the receiver"
        self._thread.post(event)

    def _describe(self, request: int) -> NodeInfo:
        return NodeInfo(0, request, ROLE, self.endpoint, "", version(), *VERSIONS, [])

    def _on_halt(self, reason: str, state: str) -> None:
        """Record that the node stopped; the program around it continues."""
        self._failure = ZiplogError(f"the receiver failed: {reason}")
        event_log.error("receiver stopped", reason=reason, state=state[:8192])
