"""Speculation: compute on records before they are final, and hold the results back.

`Log.speculate` returns the events. `process` (asyncio: `aprocess`) runs an application on them that
is three functions: `apply` computes, `undo` takes one record's effect back, `emit` gives a result
to the world. See docs/speculation.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections import deque
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from ziplog.errors import ClosedError, DeadlineError
from ziplog.runtime.descriptors import start_thread
from ziplog.runtime.waiting import INTERVAL_S
from ziplog.types import Confirmed, Delivery, Event, Failed, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from ziplog.client.async_speculation import AsyncSpeculation
    from ziplog.client.blocking_speculation import Speculation

    Apply = Callable[[list[Record]], Sequence[Any]]
    AsyncApply = Callable[[list[Record]], Sequence[Any] | Awaitable[Sequence[Any]]]
    Use = Callable[[Record, Any], object]
    Until = Callable[[Record], object]

_IS_DONE: Final = attrgetter("is_done")

__all__ = ["Confirmed", "Delivery", "Event", "Failed", "aprocess", "process"]


def process(
    events: Speculation,
    *,
    apply: Apply,
    undo: Use,
    emit: Use,
    until: Until | None = None,
) -> RecordId:
    """Run an application on the events of a speculation; emit only what is final.

    `apply` and `undo` run in one worker thread, never two at a time; `emit` and `until` are called
    in this thread, also while `apply` computes. The events are closed at the end.

    Args:
        events: from `Log.speculate`; no event was taken.
        apply: gets the next records in order, and returns one effect (any object) for each. If it
            raises, it must have had no effect.
        undo: takes the effect of one record on local state back; called with the newest first.
        emit: gives a final record's effect to the world; called in the log's order, once for each.
        until: ends the run after it returned true for an emitted record. None: the run ends with
            the events.

    Returns:
        The position after the last emitted record, where a later run continues. What was not
        emitted is undone.

    Raises:
        TypeError: `events` is not a speculation, or a function is not a plain function.
        ValueError: `apply` returned another number of effects.
        RuntimeError: `undo` or `emit` raised an exception, so local state is unknown.
        ZiplogError: of the events. What was not emitted is undone, as it is if `apply` raises.

    """
    _check_events(events, is_async=False)
    _check(until, is_async=False, apply=apply, undo=undo, emit=emit)
    run, news = _Run(events.position, events.max_pending), SimpleQueue[None]()
    worker, reader = _Worker("ziplog-apply", news), _Worker("ziplog-fetch", news)
    end: Final = _Task(_end, run, undo, events, (worker, reader))
    fetching: _Task | None = None
    try:
        while not (run.has_ended and run.is_idle):
            while (final := run.next_final()) is not None:
                record, effect = final
                with run.unknown_if_raised("emit", record):
                    emit(record, effect)
                run.on_emitted()
                if until is not None and until(record):
                    return run.position
            if run.applying is None:
                undoing = _Task(_undo_all, run, undo)
                worker.submit(undoing)
                _wait(news, undoing)
                undoing.result()
                if run.waiting:
                    # In this order: what is submitted is undone, whatever a signal handler raises.
                    run.applying = _Task(apply, run.begin())
                    worker.submit(run.applying)
            if fetching is None and run.has_room:
                fetching = _Task(events.fetch)
                reader.submit(fetching)
            _wait(news, *_under_way(run.applying, fetching))
            run.take_effects()
            if fetching is not None and fetching.is_done:
                fetched, fetching = fetching, None
                run.add(_fetched(fetched, events), is_closed=events.is_closed)
        return run.position
    finally:
        try:
            worker.submit(end)
            _wait(news, worker)
        finally:  # The wait may be interrupted, too: the second Ctrl-C.
            _wait(news, worker)
            _wait(news, reader)
        end.result()


class _Task:
    """A function that a worker calls once; `is_done` is set last."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call: Final = functools.partial(function, *args)
        self._result: Any = None
        self._error: BaseException | None = None
        self.is_done = False

    def run(self) -> None:
        """Call the function."""
        try:
            self._result = self._call()
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._error = error
        self.is_done = True

    def exception(self) -> BaseException | None:
        """Return what the function raised."""
        return self._error

    def result(self) -> Any:
        """Return what the function returned, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._result


class _Worker:
    """A thread that runs tasks one after another.

    A signal handler may raise at any step of the main thread. It would leave a lock of a
    `ThreadPoolExecutor` locked; a `SimpleQueue` is written in C.
    """

    def __init__(self, name: str, news: SimpleQueue[None]) -> None:
        """Start it; it puts a None into `news` whenever a task or the thread is done."""
        tasks = SimpleQueue[_Task | None]()
        #: Takes a task; None ends the thread. Written in C: a signal does not interrupt it.
        self.submit: Final = tasks.put
        self.is_done = False
        thread = threading.Thread(target=self._serve, args=(tasks, news), name=name, daemon=True)
        start_thread(thread, "cannot run an application")

    def _serve(self, tasks: SimpleQueue[_Task | None], news: SimpleQueue[None]) -> None:
        while (task := tasks.get()) is not None:
            task.run()
            del task
            news.put(None)
        self.is_done = True
        news.put(None)


def _wait(news: SimpleQueue[None], *parts: _Task | _Worker) -> None:
    """Wait until one of the parts is done, so that signal handlers run; without parts, return."""
    while parts and not any(map(_IS_DONE, parts)):
        with contextlib.suppress(Empty):
            news.get(timeout=INTERVAL_S)


def _end(run: _Run, undo: Use, events: Speculation, workers: Sequence[_Worker]) -> None:
    """Close the events, undo what was not emitted, and end the workers."""
    try:
        events.close()
        with contextlib.suppress(Exception):
            run.take_effects()
        run.abandon()
        _undo_all(run, undo)
    finally:
        for worker in workers:
            worker.submit(None)


def _fetched(
    fetched: _Task | asyncio.Task[list[Event]], events: Speculation | AsyncSpeculation
) -> list[Event]:
    """Return what was fetched: nothing, if the application closed the events before."""
    error = fetched.exception()
    if isinstance(error, ClosedError) and events.is_closed:
        return []
    found: list[Event] = fetched.result()
    return found


def _undo_all(run: _Run, undo: Use) -> None:
    """Undo the void effects, the newest first."""
    for record, effect in run.pop_void():
        with run.unknown_if_raised("undo", record):
            undo(record, effect)


async def aprocess(
    events: AsyncSpeculation,
    *,
    apply: AsyncApply,
    undo: Use,
    emit: Use,
    until: Until | None = None,
) -> RecordId:
    """Run an application on the events of a speculation; see `process`.

    `apply`, `undo` and `emit` may be coroutine functions. A plain `apply` or `undo` runs in a
    thread (`asyncio.to_thread`), a plain `emit` in the event loop.
    """
    _check_events(events, is_async=True)
    _check(until, is_async=True, apply=apply, undo=undo, emit=emit)
    await events
    run = _Run(events.position, events.max_pending)
    applying: asyncio.Task[Sequence[Any]] | None = None
    fetching: asyncio.Task[list[Event]] | None = None
    undoing: asyncio.Task[None] | None = None
    try:
        while not (run.has_ended and run.is_idle):
            while (final := run.next_final()) is not None:
                record, effect = final
                with run.unknown_if_raised("emit", record):
                    emitted = emit(record, effect)
                    if inspect.isawaitable(emitted):
                        await emitted
                run.on_emitted()
                if until is not None and until(record):
                    return run.position
            if applying is None:
                undoing = asyncio.ensure_future(_aundo_all(run, undo))
                await asyncio.shield(undoing)
                if run.waiting:
                    applying = asyncio.ensure_future(_call(apply, run.begin()))
            if fetching is None and run.has_room:
                fetching = asyncio.ensure_future(events.fetch())
            tasks = _under_way(applying, fetching)
            if tasks:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if applying is not None and applying.done():
                done, applying = applying, None
                run.end(done.result())
            if fetching is not None and fetching.done():
                fetched, fetching = fetching, None
                run.add(_fetched(fetched, events), is_closed=events.is_closed)
        return run.position
    finally:
        under_way = _under_way(undoing, fetching, applying)
        await _completed(asyncio.ensure_future(_aend(events, run, undo, under_way, applying)))


async def _completed(ending: asyncio.Task[None]) -> None:
    """Wait until a task is done, also if this task is cancelled meanwhile."""
    cancellation: asyncio.CancelledError | None = None
    while not ending.done():
        try:
            await asyncio.wait([ending])
        except asyncio.CancelledError as error:
            cancellation = error
    ending.result()
    if cancellation is not None:
        raise cancellation


async def _aend(
    events: AsyncSpeculation,
    run: _Run,
    undo: Use,
    tasks: Sequence[asyncio.Task[Any]],
    applying: asyncio.Task[Sequence[Any]] | None,
) -> None:
    """Close the events, let the tasks end, and undo what was not emitted."""
    await events.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    if applying is not None and not applying.cancelled() and applying.exception() is None:
        with contextlib.suppress(Exception):
            run.end(applying.result())
    run.abandon()
    await _aundo_all(run, undo)


async def _aundo_all(run: _Run, undo: Use) -> None:
    for record, effect in run.pop_void():
        with run.unknown_if_raised("undo", record):
            await _call(undo, record, effect)


async def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Await a coroutine function; run another one in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result = await asyncio.to_thread(function, *args)
    return await result if inspect.isawaitable(result) else result


def _under_way(*tasks: Any) -> list[Any]:
    """Return the tasks or futures that exist."""
    return [task for task in tasks if task is not None]


def _check_events(events: object, *, is_async: bool) -> None:
    fetch = getattr(type(events), "fetch", None)
    if fetch is None or inspect.iscoroutinefunction(fetch) is not is_async:
        client = "ziplog.aio.AsyncLog" if is_async else "ziplog.Log"
        kind = type(events).__name__
        raise TypeError(f"events must be what `speculate` of a {client} returns, not {kind}")


def _check(until: object, *, is_async: bool, **functions: object) -> None:
    if until is not None:
        functions["until"] = until
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{name} must be callable, not {type(function).__name__}")
        if _is_coroutine_function(function) and not (is_async and name != "until"):
            raise TypeError(
                f"{name} must be a plain function: only `apply`, `undo` and `emit` of `aprocess`"
                " may be coroutine functions"
            )


def _is_coroutine_function(function: object) -> bool:
    """Whether a call returns a coroutine, also of an object with an asynchronous `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(type(function), "__call__", None)  # noqa: B004 - it may be a coroutine function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


class _Run:
    """The records of one run, by what happened to them.

    waiting --begin--> in `apply` --end--> applied --Confirmed--> emitted;  --Failed--> undone.

    No signal handler separates values that belong together: CPython runs handlers at calls and
    loops, and there is none between the statements that store them.
    """

    def __init__(self, position: RecordId, max_pending: int) -> None:
        #: Behind the last emitted record.
        self.position = position
        self._max_pending: Final = max_pending
        #: Delivered records that were not applied.
        self.waiting: deque[Record] = deque()
        #: The records in `apply`; the first `_valid` of them are not void.
        self._in_apply: list[Record] = []
        self._valid = 0
        #: Of a blocking run: the task of the records in `apply`.
        self.applying: _Task | None = None
        #: Applied records with their effects: not emitted, and to be undone.
        self._applied: deque[tuple[Record, Any]] = deque()
        self._void: list[tuple[Record, Any]] = []
        #: The last position that is final.
        self._final = position.gsn - 1
        #: No event will follow.
        self.has_ended = False
        #: `undo` or `emit` raised an exception: nothing more is undone.
        self._is_unknown = False

    @property
    def has_room(self) -> bool:
        """Whether more events may be fetched."""
        return not self.has_ended and len(self.waiting) < self._max_pending

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to apply, to emit or to undo."""
        is_final = self.next_final() is not None
        return not (self.waiting or self._in_apply or self._void or is_final)

    def add(self, events: list[Event], *, is_closed: bool) -> None:
        """Add the next events; without any, the events have ended, or the time-out is over."""
        if not events:
            if not is_closed:
                raise DeadlineError("no event came within the time-out of the speculation")
            self.has_ended = True
        for event in events:
            if type(event) is Delivery:
                self.waiting.append(event.record)
            elif type(event) is Confirmed:
                self._final = max(self._final, event.upto.gsn)
            elif type(event) is Failed:
                self._withdraw(event.after.gsn)

    def _withdraw(self, after: int) -> None:
        """Withdraw all records behind a position."""
        while self.waiting and self.waiting[-1].rid.gsn > after:
            self.waiting.pop()
        while self._valid and self._in_apply[self._valid - 1].rid.gsn > after:
            self._valid -= 1
        kept = [pair for pair in self._applied if pair[0].rid.gsn <= after]
        applied, void = deque(kept), [*list(self._applied)[len(kept) :], *self._void]
        self._applied, self._void = applied, void

    def begin(self) -> list[Record]:
        """Return the next records to apply."""
        count = min(len(self.waiting), self._max_pending)
        self._in_apply = [self.waiting.popleft() for _ in range(count)]
        self._valid = count
        return list(self._in_apply)

    def end(self, effects: Sequence[Any]) -> None:
        """Take the effects of the records in `apply`."""
        records, valid = self._in_apply, self._valid
        if len(effects) != len(records):
            raise ValueError(
                f"apply returned {len(effects)} effects; it must return one effect for each of"
                f" {len(records)} records; what is unconfirmed is undone"
            )
        pairs = list(zip(records, effects, strict=True))
        applied, void = pairs[:valid], pairs[valid:]
        self._applied += applied
        self._void += void
        self._in_apply, self._valid = [], 0

    def take_effects(self) -> None:
        """Take the effects that the worker computed, if it is done."""
        if self.applying is not None and self.applying.is_done:
            self.end(self.applying.result())
            self.applying = None

    def next_final(self) -> tuple[Record, Any] | None:
        """Return the next record to emit, with its effect; None: none is final."""
        applied = self._applied
        return applied[0] if applied and applied[0][0].rid.gsn <= self._final else None

    def on_emitted(self) -> None:
        """Remove the record that was emitted."""
        rid = self._applied.popleft()[0].rid
        self.position = RecordId(rid.gsn + 1, rid.shard)

    def pop_void(self) -> Iterator[tuple[Record, Any]]:
        """Return and remove the records to undo, the newest first."""
        while self._void and not self._is_unknown:
            yield self._void.pop()

    def abandon(self) -> None:
        """Withdraw everything that was not emitted."""
        self.waiting.clear()
        self._void = [*self._applied, *self._void]
        self._applied.clear()

    @contextlib.contextmanager
    def unknown_if_raised(self, name: str, record: Record) -> Iterator[None]:
        """Note that local state is unknown if `undo` or `emit` raises an exception."""
        try:
            yield
        except Exception as error:
            self._is_unknown = True
            raise RuntimeError(
                f"{name} raised {type(error).__name__} for record {record.rid}: local state is"
                " unknown"
            ) from error
