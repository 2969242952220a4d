"""Raises an exception in a signal handler, at every step where CPython could run the handler.

CPython runs signal handlers in the main thread at the start of a function, at the backward jump of
a loop, and after a call of a C function. `interrupted` traces a run opcode by opcode and raises a
signal at the n-th such place, for n = 1, 2, ... until a run has fewer places. The tested code
decides whether the handler runs there or is delayed. From Python 3.12 on, `sys.settrace` reports no
opcodes of a function that ran without it before; `sys.monitoring` does.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import signal
import sys
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

SIGNAL: Final = signal.SIGUSR1
#: The modules in which steps are counted: our clients and the modules that they use.
_TRACED: Final = (
    "/ziplog/client/",
    "/ziplog/runtime/transport.py",
    "/ziplog/runtime/connection.py",
    "/ziplog/runtime/waiting.py",
    "/logdb/client/",
    "/concurrent/futures/_base.py",
    "/threading.py",
    "/weakref.py",
)
#: Steps in it count, too, if one of these modules calls it.
_CALLED: Final = "/contextlib.py"
_AFTER: Final = {"RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX"}
#: The number of this module among the tools of `sys.monitoring`.
_TOOL: Final = 4


class Struck(Exception):  # noqa: N818 - it is no error
    """The exception of the handler."""


def strike(*_: object) -> None:
    """Raise `Struck`; a signal handler."""
    raise Struck


class Interrupter:
    """Raises the signal once, at one step."""

    def __init__(self, at: int) -> None:
        self._at: Final = at
        #: Number of steps so far.
        self.steps = 0
        #: The place where it was raised.
        self.where = "nowhere"
        #: The signal was raised: the rest of the run has no further step of interest.
        self.is_done = False
        #: The opcodes of each frame by their offset.
        self._opcodes: dict[FrameType, dict[int, str]] = {}
        #: The last opcode of each frame; "" after it entered a Python function.
        self._last: dict[FrameType, str] = {}

    def trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        """Process an event of `sys.settrace`."""
        if event == "call":
            if not self.enter(frame):
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        elif event == "opcode":
            self.pass_opcode(frame)
            if self.is_done:
                sys.settrace(None)
        elif event == "return":
            self.leave(frame)
        return self.trace

    def enter(self, frame: FrameType) -> bool:
        """Process the start of a function; return whether its opcodes count."""
        path, is_of_traced = frame.f_code.co_filename, frame.f_back in self._last
        if is_of_traced:
            self._last[frame.f_back] = ""
        if not _is_traced(path) and not (is_of_traced and path.endswith(_CALLED)):
            return False
        self._opcodes[frame] = _opcodes(frame.f_code)
        self._last[frame] = "RESUME"
        return True

    def pass_opcode(self, frame: FrameType) -> None:
        """Process an opcode that comes next in a frame."""
        if self.is_done or frame not in self._last:
            return
        name = self._opcodes[frame][frame.f_lasti]
        last, self._last[frame] = self._last[frame], name
        if "JUMP_BACKWARD" in name or last in _AFTER:
            self._step(frame)

    def leave(self, frame: FrameType) -> None:
        """Process the end of a function."""
        self._last.pop(frame, None)
        self._opcodes.pop(frame, None)

    def forget(self) -> None:
        """Drop all frames, so that their objects can be collected."""
        self._last.clear()
        self._opcodes.clear()

    def _step(self, frame: FrameType) -> None:
        self.steps += 1
        if self.steps == self._at:
            self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
            self.is_done = True
            signal.raise_signal(SIGNAL)


@cache
def _is_traced(path: str) -> bool:
    return "/tests/" not in path and any(part in path for part in _TRACED)


@cache
def _opcodes(code: CodeType) -> dict[int, str]:
    return {each.offset: each.opname for each in dis.get_instructions(code)}


@contextlib.contextmanager
def _traced(interrupter: Interrupter) -> Iterator[None]:
    with _monitored(interrupter) if sys.version_info >= (3, 12) else _set_trace(interrupter):
        yield
    interrupter.forget()


@contextlib.contextmanager
def _set_trace(interrupter: Interrupter) -> Iterator[None]:
    former = sys.gettrace()
    sys.settrace(interrupter.trace)
    try:
        yield
    finally:
        sys.settrace(former)


@contextlib.contextmanager
def _monitored(interrupter: Interrupter) -> Iterator[None]:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    thread = threading.get_ident()

    def calling(process: Callable[[FrameType], object]) -> Callable[..., None]:
        def callback(*_: object) -> None:
            if threading.get_ident() == thread:
                process(sys._getframe(1))

        return callback

    events = monitoring.events
    process = {
        events.PY_START: interrupter.enter,
        events.PY_RESUME: interrupter.enter,
        events.PY_THROW: interrupter.enter,
        events.INSTRUCTION: interrupter.pass_opcode,
        events.PY_RETURN: interrupter.leave,
        events.PY_YIELD: interrupter.leave,
        events.PY_UNWIND: interrupter.leave,
    }
    monitoring.use_tool_id(_TOOL, __name__)
    try:
        for event, function in process.items():
            monitoring.register_callback(_TOOL, event, calling(function))
        monitoring.set_events(_TOOL, sum(process))
        yield
    finally:
        monitoring.set_events(_TOOL, 0)
        for event in process:
            monitoring.register_callback(_TOOL, event, None)
        monitoring.free_tool_id(_TOOL)


def interrupted(run: Callable[[], None], check: Callable[[], None]) -> int:
    """Interrupt a run at each of its steps; return the number of steps.

    Args:
        run: does the same each time, and continues after a `Struck`.
        check: asserts what must hold after it; is not interrupted.

    """
    former = signal.signal(SIGNAL, strike)
    at = 1
    # Each run is followed by a collection, which only needs to look at new objects.
    gc.collect()
    gc.freeze()
    try:
        while True:
            interrupter = Interrupter(at)
            with _traced(interrupter):
                run()
            assert signal.getsignal(SIGNAL) is strike, f"the handler was not put back at {at}"
            try:
                check()
            except BaseException as error:
                error.add_note(f"interrupted at step {at}, in {interrupter.where}")
                raise
            if interrupter.steps < at:
                return interrupter.steps
            at += 1
    finally:
        gc.unfreeze()
        signal.signal(SIGNAL, former)
