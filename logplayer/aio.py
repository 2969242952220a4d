"""Players and receivers with coroutines; they still run in threads of their own."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

from logplayer import player, receiver
from ziplog.client import arguments
from ziplog.errors import DeadlineError, ZiplogError
from ziplog.runtime.descriptors import start_thread
from ziplog.types import RID_GENESIS, RecordId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import Self

    import ziplog
    import ziplog.aio
    from logplayer.contract import TargetSpec
    from logplayer.player import Start

T = TypeVar("T")

#: Longest time that a thread waits on after its coroutine was cancelled, in seconds.
_PART_S: Final = 1.0


class Player:
    """Delivers the records of a log to targets; use it in an `async with` statement."""

    def __init__(
        self,
        log: ziplog.Log | ziplog.aio.AsyncLog | str | Sequence[str],
        name: str,
        targets: Sequence[TargetSpec],
        *,
        start: Start = RID_GENESIS,
        **options: Any,
    ) -> None:
        """Check the arguments; they are those of `logplayer.Player`."""
        self._player: Final = player.Player(log, name, targets, start=start, **options)

    async def __aenter__(self) -> Self:
        """Start the player, and return it; a cancellation stops it."""
        await _started(self.start, self.stop)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the player."""
        await self.stop()

    def __repr__(self) -> str:
        return f"<logplayer.aio.Player {self._player.name}>"

    @property
    def failed_tasks(self) -> dict[str, str]:
        """See `logplayer.Player.failed_tasks`."""
        return self._player.failed_tasks

    async def start(self, timeout: float | None = None) -> None:
        """See `logplayer.Player.start`."""
        await _in_thread(lambda: self._player.start(timeout))

    async def join(self, timeout: float | None = None) -> bool:
        """See `logplayer.Player.join`."""
        return await _wait(self._player.join, timeout)

    async def stop(self, timeout: float | None = None) -> None:
        """See `logplayer.Player.stop`."""
        if self._player.is_in_target:  # Here; another thread would wait for this step.
            self._player.stop(timeout)
            return
        await _in_thread(lambda: self._player.stop(timeout))

    async def status(self, timeout: float | None = None) -> dict[str, Any]:
        """See `logplayer.Player.status`."""
        return await _in_thread(lambda: self._player.status(timeout))

    async def metrics(self, timeout: float | None = None) -> str:
        """See `logplayer.Player.metrics`."""
        return await _in_thread(lambda: self._player.metrics(timeout))

    async def wait_until(self, position: RecordId, timeout: float | None = None) -> None:
        """See `logplayer.Player.wait_until`."""
        await _wait(lambda part: self._player.wait_until(position, part), timeout)

    async def pause(self, target: str | None = None) -> None:
        """See `logplayer.Player.pause`."""
        await _in_thread(lambda: self._player.pause(target))

    async def resume(self, target: str | None = None) -> None:
        """See `logplayer.Player.resume`."""
        await _in_thread(lambda: self._player.resume(target))

    async def seek(self, target: str, position: RecordId) -> None:
        """See `logplayer.Player.seek`."""
        await _in_thread(lambda: self._player.seek(target, position))


class Receiver:
    """Receives batches of players; use it in an `async with` statement."""

    def __init__(self, address: str, target: TargetSpec, *, insecure: bool = False) -> None:
        """Check the arguments; they are those of `logplayer.Receiver`."""
        self._receiver: Final = receiver.Receiver(address, target, insecure=insecure)

    async def __aenter__(self) -> Self:
        """Start it, and return it; a cancellation closes it."""
        await _started(self.start, self.close)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    def __repr__(self) -> str:
        return f"<logplayer.aio.Receiver at {self.endpoint}>"

    @property
    def endpoint(self) -> str:
        """Where it listens, "host:port"; once it is started, with the actual port."""
        return self._receiver.endpoint

    async def start(self) -> None:
        """See `logplayer.Receiver.start`."""
        await _in_thread(self._receiver.start)

    async def serve(self) -> None:
        """Receive until `close`, or until the task is cancelled; see `logplayer.Receiver.serve`."""
        try:
            await _in_thread(self._receiver.serve)
        except asyncio.CancelledError:
            await self.close()
            raise

    async def close(self) -> None:
        """See `logplayer.Receiver.close`."""
        await _in_thread(self._receiver.close)


async def _started(
    start: Callable[[], Awaitable[None]], stop: Callable[[], Awaitable[None]]
) -> None:
    """Start what runs in threads, which go on after a cancellation: then stop it."""
    try:
        await start()
    except asyncio.CancelledError:
        with contextlib.suppress(ZiplogError):
            await stop()
        raise


async def _wait(call: Callable[[float], T], timeout: float | None) -> T:
    """Return the result of a call that waits, repeated until its time-out.

    After a cancellation its thread ends with the part under way.
    """
    left = arguments.timeout_s(timeout, math.inf)
    loop = asyncio.get_running_loop()
    until = loop.time() + left
    while left > _PART_S:
        try:
            result = await _in_thread(lambda: call(_PART_S))
        except DeadlineError:
            pass
        else:
            if result is not False:
                return result
        left = max(until - loop.time(), 0)
    return await _in_thread(lambda: call(left))


async def _in_thread(call: Callable[[], T]) -> T:
    """Return the result of a blocking call.

    Its thread does not keep the event loop or the process from ending, as those of
    `asyncio.to_thread` do.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(set_result: Callable[[Any], None], result: Any) -> None:
        if not done.done():
            set_result(result)

    def run() -> None:
        set_result: Callable[[Any], None] = done.set_result
        result: Any
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            set_result, result = done.set_exception, error
        with contextlib.suppress(RuntimeError):  # The loop was closed meanwhile.
            loop.call_soon_threadsafe(finish, set_result, result)

    thread = threading.Thread(target=run, name="player call", daemon=True)
    start_thread(thread, "cannot wait in a thread")
    return await done
