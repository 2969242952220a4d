"""`ziplog.speculation`: what is emitted is final, and what is not is undone (W6)."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import threading
import traceback
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from tests.waiting import next_turn, wait_until
from ziplog import speculation
from ziplog.errors import ClosedError, DeadlineError
from ziplog.speculation import Confirmed, Delivery, Failed, aprocess, process
from ziplog.types import Event, Record, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

Step = list[Event] | Exception


def rid(gsn: int) -> RecordId:
    return RecordId(gsn, 0)


def record(gsn: int, version: int = 0) -> Record:
    return Record(rid(gsn), b"%d" % version, None, 0, 0)


def deliver(*gsns: int, version: int = 0) -> list[Event]:
    return [Delivery(record(gsn, version), speculative=True) for gsn in gsns]


class Script:
    """A speculation whose fetches return given events, then nothing: it was closed."""

    max_pending = 3

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.position = rid(1)
        self.is_closed = False
        #: Called before each fetch.
        self.before: Callable[[], None] = lambda: None

    def fetch(self) -> list[Event]:
        self.before()
        if not self.steps:
            self.is_closed = True
            return []
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    def close(self) -> None:
        self.is_closed = True


class AsyncScript(Script):
    """The same for asyncio."""

    def __await__(self) -> Any:
        return iter(())

    async def fetch(self) -> list[Event]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().fetch()

    async def close(self) -> None:  # type: ignore[override]
        super().close()


class App:
    """Local state that is a list, and output that is another one."""

    def __init__(self) -> None:
        self.state: list[tuple[int, bytes]] = []
        self.output: list[tuple[int, bytes]] = []
        self.undone: list[int] = []
        self.batches: list[int] = []
        self.threads: set[int] = set()

    def apply(self, records: list[Record]) -> list[int]:
        self.threads.add(threading.get_ident())
        self.batches.append(len(records))
        self.state += [(one.rid.gsn, one.payload) for one in records]
        return [one.rid.gsn * 10 for one in records]

    def undo(self, one: Record, effect: int) -> None:
        self.threads.add(threading.get_ident())
        assert effect == one.rid.gsn * 10
        assert self.state.pop() == (one.rid.gsn, one.payload), "the newest is undone first"
        self.undone.append(one.rid.gsn)

    def emit(self, one: Record, effect: int) -> None:
        assert effect == one.rid.gsn * 10
        self.output.append((one.rid.gsn, one.payload))

    def run(self, *steps: Step, until: Any = None) -> RecordId:
        return process(
            Script(*steps), apply=self.apply, undo=self.undo, emit=self.emit, until=until
        )  # type: ignore[arg-type]

    def arun(self, *steps: Step, until: Any = None) -> RecordId:
        async def apply(records: list[Record]) -> list[int]:
            await asyncio.sleep(0)
            return self.apply(records)

        async def emit(one: Record, effect: int) -> None:
            self.emit(one, effect)

        return asyncio.run(
            aprocess(AsyncScript(*steps), apply=apply, undo=self.undo, emit=emit, until=until)  # type: ignore[arg-type]
        )


def gsns(rows: list[tuple[int, bytes]]) -> list[int]:
    return [gsn for gsn, _ in rows]


@pytest.fixture(params=["blocking", "asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[..., tuple[App, RecordId]]:
    """Run both: return the application and the position."""

    def run(*steps: Step, until: Any = None) -> tuple[App, RecordId]:
        app = App()
        runs = {"blocking": app.run, "asyncio": app.arun}
        return app, runs[request.param](*steps, until=until)

    return run


def test_final_records_are_emitted_and_others_are_undone(run: Any) -> None:
    app, position = run(deliver(1, 2, 3), [Confirmed(rid(2))])
    assert gsns(app.output) == [1, 2]
    assert gsns(app.state) == [1, 2]
    assert app.undone == [3]
    assert position == rid(3)


def test_nothing_is_emitted_before_it_is_confirmed(run: Any) -> None:
    app, position = run(deliver(1, 2, 3))
    assert app.output == []
    assert app.undone == [3, 2, 1]
    assert position == rid(1)


def test_withdrawn_records_are_undone_before_the_next_ones_are_applied(run: Any) -> None:
    app, position = run(
        deliver(1, 2, 3), [Failed(rid(1)), *deliver(2, 4, version=1)], [Confirmed(rid(4))]
    )
    assert app.output == app.state == [(1, b"0"), (2, b"1"), (4, b"1")]
    assert position == rid(5)


def test_run_ends_behind_the_record_that_was_waited_for(run: Any) -> None:
    app, position = run(
        deliver(1, 2, 3, 4), [Confirmed(rid(3))], until=lambda one: one.rid.gsn == 2
    )
    assert gsns(app.output) == gsns(app.state) == [1, 2]
    assert position == rid(3)


def test_error_of_the_events_undoes_what_is_open(run: Any) -> None:
    with pytest.raises(ClosedError):
        run(deliver(1, 2), [Confirmed(rid(1))], ClosedError("the client"))


def test_events_that_the_application_closed_have_ended() -> None:
    app = App()

    def emit(record: Record, effect: Any) -> None:
        app.emit(record, effect)
        script.close()

    def fetch_closed() -> None:
        if script.is_closed:
            raise ClosedError("this speculation")

    script: Any = Script(deliver(1), [Confirmed(rid(1))], deliver(2), [Confirmed(rid(2))])
    script.before = fetch_closed
    process(script, apply=app.apply, undo=app.undo, emit=emit)
    assert app.output[0] == (1, b"0")


def test_silence_is_a_deadline_error(run: Any) -> None:
    with pytest.raises(DeadlineError, match="no event came"):
        run(deliver(1), [])


@pytest.mark.parametrize("name", ["apply", "undo", "emit", "until"])
def test_functions_are_checked(name: str) -> None:
    functions: dict[str, Any] = dict.fromkeys(["apply", "undo", "emit"], print) | {name: 5}
    script, async_script = Script(), AsyncScript()
    with pytest.raises(TypeError, match=f"{name} must be callable, not int"):
        process(script, **functions)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"{name} must be callable"):
        asyncio.run(aprocess(async_script, **functions))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["apply", "undo", "emit", "until"])
def test_a_coroutine_function_that_nothing_awaits_is_refused(name: str) -> None:
    async def coroutine(*_: object) -> None:
        pytest.fail("it ran")

    class Coroutine:
        async def __call__(self, *_: object) -> None:
            pytest.fail("it ran")

    plain: dict[str, Any] = dict.fromkeys(["apply", "undo", "emit"], print)
    for function in (coroutine, Coroutine(), partial(coroutine), partial(Coroutine())):
        functions = plain | {name: function}
        with pytest.raises(TypeError, match=f"{name} must be a plain function"):
            process(Script(), **functions)  # type: ignore[arg-type]
        if name == "until":
            with pytest.raises(TypeError, match="until must be a plain function"):
                asyncio.run(aprocess(AsyncScript(), **functions))  # type: ignore[arg-type]


def test_events_are_checked() -> None:
    functions: dict[str, Any] = dict.fromkeys(["apply", "undo", "emit"], print)
    wrong: Any
    for wrong in ([], None, AsyncScript()):
        with pytest.raises(TypeError, match=r"events must be what `speculate` of a ziplog\.Log"):
            process(wrong, **functions)
    for wrong in ([], None, Script()):
        with pytest.raises(TypeError, match=r"of a ziplog\.aio\.AsyncLog returns, not"):
            asyncio.run(aprocess(wrong, **functions))


def test_failed_apply_undoes_what_is_open() -> None:
    app = App()
    plain = app.apply

    def apply(records: list[Record]) -> list[int]:
        if records[-1].rid.gsn == 4:
            raise ValueError("no")
        return plain(records)

    app.apply = apply  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no"):
        app.run(deliver(1, 2), [Confirmed(rid(1))], deliver(4))
    assert gsns(app.state) == gsns(app.output)


def test_each_record_needs_an_effect() -> None:
    app = App()
    script: Any = Script(deliver(1, 2))
    with pytest.raises(ValueError, match="apply returned 1 effects; it must return one effect"):
        process(script, apply=lambda _: [5], undo=app.undo, emit=app.emit)
    assert not app.undone
    assert script.is_closed


@pytest.mark.parametrize("name", ["undo", "emit"])
def test_exception_of_undo_or_emit_ends_the_run(name: str, run: Any) -> None:
    del run
    app = App()
    calls: list[int] = []

    def fail(one: Record, _effect: int) -> None:
        calls.append(one.rid.gsn)
        raise OSError("disk")

    setattr(app, name, fail)
    with pytest.raises(RuntimeError, match=rf"{name} raised OSError .*: local state is unknown"):
        app.run(deliver(1, 2, 3), [Confirmed(rid(1))])
    assert len(calls) == 1
    assert app.undone == [], "nothing more is undone"


def test_interrupted_emit_is_undone() -> None:
    app = App()

    def interrupt(_one: Record, _effect: int) -> None:
        raise KeyboardInterrupt

    app.emit = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        app.run(deliver(1, 2), [Confirmed(rid(2))])
    assert app.state == []


class Interruption(BaseException):
    """What the handler of a signal raises."""


def interrupt_call(number: int) -> None:
    """Raise at a call of a function of `ziplog.speculation` in this thread, where handlers run."""
    calls = itertools.count(1)

    def trace(frame: FrameType, event: str, _arg: object) -> None:
        is_own = frame.f_code.co_filename == speculation.__file__
        if event == "call" and is_own and next(calls) == number:
            raise Interruption

    sys.settrace(trace)


def test_signal_handler_that_raises_anywhere_leaves_nothing_that_was_not_emitted() -> None:
    for number in itertools.count(1):
        app = App()
        script: Any = Script(
            deliver(1, 2, 3),
            [Confirmed(rid(1)), Failed(rid(2)), *deliver(3, version=1)],
            [Confirmed(rid(3))],
            deliver(4, 5),
        )
        try:
            interrupt_call(number)
            process(script, apply=app.apply, undo=app.undo, emit=app.emit)
        except Interruption:
            sys.settrace(None)
        else:
            break
        finally:
            sys.settrace(None)
        # A record whose `emit` was interrupted counts as one that was not emitted.
        wait_until(
            lambda: app.state in (app.output, app.output[:-1]),  # noqa: B023 - called at once
            f"all is undone that was not emitted before call {number}",
        )


def test_a_wait_for_events_ends_by_the_handler_of_a_signal_to_another_thread() -> None:
    """The kernel may select any thread of the process, as it does right after a suspension."""
    main = threading.main_thread().ident
    assert main is not None
    script, closed = Script(), threading.Event()

    def is_waiting() -> bool:
        frames = [frame for frame, _ in traceback.walk_stack(sys._current_frames()[main])]
        return frames[0].f_code is speculation._wait.__code__

    def fetch() -> list[Event]:
        wait_until(is_waiting, "the main thread waits for events")
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        assert closed.wait(60), "the handler has not run"
        return []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    script.fetch, script.close = fetch, closed.set  # type: ignore[method-assign]
    app, former = App(), signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            process(script, apply=app.apply, undo=app.undo, emit=app.emit)  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_second_interruption_waits_for_the_undo_under_way() -> None:
    app, script, closed = App(), Script(deliver(1, 2)), threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def fetch() -> list[Event]:
        if script.steps:
            return Script.fetch(script)
        wait_until(lambda: len(app.state) == 2, "the records were applied")
        signal.pthread_kill(main, signal.SIGUSR1)
        assert closed.wait(60)
        return []

    def undo(one: Record, effect: int) -> None:
        if len(interruptions) == 1:
            signal.pthread_kill(main, signal.SIGUSR1)
        wait_until(lambda: len(interruptions) == 2, "the second interruption")
        app.undo(one, effect)

    interruptions: list[int] = []

    def interrupt(*_: object) -> None:
        interruptions.append(1)
        raise KeyboardInterrupt

    script.fetch, script.close = fetch, closed.set  # type: ignore[method-assign]
    former = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            process(script, apply=app.apply, undo=undo, emit=app.emit)  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert app.state == []


def test_apply_and_undo_share_one_thread_that_is_not_this_one() -> None:
    app = App()
    app.run(deliver(1, 2), [Failed(rid(1))], deliver(3), [Confirmed(rid(3))])
    assert len(app.threads) == 1
    assert threading.get_ident() not in app.threads


def test_results_are_emitted_while_the_next_batch_is_computed() -> None:
    app = App()
    emitted = threading.Event()
    applied = app.apply
    waited: list[bool] = []

    def apply(records: list[Record]) -> Sequence[int]:
        if records[0].rid.gsn == 2:
            waited.append(emitted.wait(60))
        return applied(records)

    def emit(one: Record, effect: int) -> None:
        App.emit(app, one, effect)
        emitted.set()

    script: Any = Script(deliver(1), deliver(2), [Confirmed(rid(1))], [Confirmed(rid(2))])
    process(script, apply=apply, undo=app.undo, emit=emit)
    assert waited == [True]
    assert gsns(app.output) == [1, 2]


def test_withdrawal_waits_for_the_apply_under_way() -> None:
    app = App()
    failed = threading.Event()
    applied = app.apply

    def apply(records: list[Record]) -> Sequence[int]:
        if records[0].payload == b"0":
            assert failed.wait(60)
        return applied(records)

    script: Any = Script(
        deliver(1, 2), [Failed(rid(0)), *deliver(2, version=1)], [Confirmed(rid(2))]
    )
    script.before = lambda: failed.set() if len(script.steps) < 2 else None
    position = process(script, apply=apply, undo=app.undo, emit=app.emit)
    assert app.output == app.state == [(2, b"1")]
    assert app.undone == [2, 1]
    assert position == rid(3)


def test_cancelled_run_undoes_what_is_open() -> None:
    app = App()

    async def main() -> None:
        started, closing = asyncio.Event(), asyncio.Event()
        script: Any = AsyncScript(deliver(1, 2))

        async def fetch() -> list[Event]:
            if script.steps:
                return list(script.steps.pop(0))
            started.set()
            await closing.wait()
            return []

        async def close() -> None:
            closing.set()

        script.fetch, script.close = fetch, close
        task = asyncio.ensure_future(
            aprocess(script, apply=app.apply, undo=app.undo, emit=app.emit)
        )
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert app.undone == [2, 1]
    assert app.state == []


def test_cancelled_run_undoes_what_is_open_whatever_apply_returns() -> None:
    app = App()

    async def main() -> None:
        is_applying, closing = asyncio.Event(), asyncio.Event()
        script: Any = AsyncScript(deliver(1), deliver(2))
        fetch_next = script.fetch

        async def fetch() -> list[Event]:
            if script.steps:
                return list(await fetch_next())
            await closing.wait()
            return []

        async def close() -> None:
            closing.set()

        async def apply(records: list[Record]) -> Any:
            if not app.state:
                return app.apply(records)
            is_applying.set()
            await closing.wait()
            return None

        script.fetch, script.close = fetch, close
        task = asyncio.ensure_future(aprocess(script, apply=apply, undo=app.undo, emit=app.emit))
        await is_applying.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert app.undone == [1]
    assert app.state == []


@pytest.mark.parametrize("is_cancelled_twice", [False, True])
def test_cancellation_at_any_time_leaves_nothing_that_was_not_emitted(
    is_cancelled_twice: bool,
) -> None:
    app = App()

    async def apply(records: list[Record]) -> list[int]:
        await next_turn()
        return app.apply(records)

    async def undo(one: Record, effect: int) -> None:
        await next_turn()
        app.undo(one, effect)

    async def run_and_cancel(steps: int) -> bool:
        script: Any = AsyncScript(deliver(1, 2), [Confirmed(rid(1))], deliver(3))
        task = asyncio.ensure_future(aprocess(script, apply=apply, undo=undo, emit=app.emit))
        for _ in range(steps):
            await next_turn()
        is_late = not task.cancel()
        if is_cancelled_twice:
            await next_turn()
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        return is_late

    for steps in itertools.count():
        app.state, app.output = [], []
        is_late = asyncio.run(run_and_cancel(steps))
        assert app.state == app.output
        if is_late:
            break


@st.composite
def scripts(draw: st.DrawFn) -> tuple[list[list[Event]], list[tuple[int, bytes]]]:
    """Return batches of events that keep W1 to W4, and the rows that they confirm."""
    events: list[Event] = []
    pending: list[tuple[int, bytes]] = []
    final: list[tuple[int, bytes]] = []
    version = 0
    for _ in range(draw(st.integers(0, 30))):
        last = (pending or final or [(0, b"")])[-1][0]
        match draw(st.sampled_from(["deliver", "deliver", "confirm", "fail"])):
            case "deliver":
                row = (last + draw(st.integers(1, 3)), b"%d" % version)
                pending.append(row)
                events += deliver(row[0], version=version)
            case "confirm" if pending:
                count = draw(st.integers(1, len(pending)))
                events.append(Confirmed(rid(pending[count - 1][0])))
                final += pending[:count]
                del pending[:count]
            case "fail" if pending:
                count = draw(st.integers(0, len(pending) - 1))
                events.append(Failed(rid(pending[count][0] - 1)))
                del pending[count:]
                version += 1
    cuts = draw(st.lists(st.integers(0, len(events)), max_size=8).map(sorted))
    parts = [events[a:b] for a, b in zip([0, *cuts], [*cuts, len(events)], strict=True)]
    return [part for part in parts if part], final


@examples(100, derandomize=True)
@given(scripts(), st.sampled_from(["run", "arun"]))
def test_output_is_what_is_confirmed(
    made: tuple[list[list[Event]], list[tuple[int, bytes]]], name: str
) -> None:
    batches, final = made
    app = App()
    position = getattr(app, name)(*batches)
    assert app.output == final
    assert app.state == final
    assert position == rid(final[-1][0] + 1 if final else 1)
