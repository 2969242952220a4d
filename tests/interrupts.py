"""Raises an exception in a signal handler, at every step where CPython could run the handler.

CPython runs signal handlers in the main thread at the start of a function, at the backward jump of
a loop, and after a call of a C function. `interrupted` traces a run opcode by opcode and raises a
signal at the n-th such place, for n = 1, 2, ... until a run has fewer places. The tested code
decides whether the handler runs there or is delayed.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import signal
import sys
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
_AFTER: Final = {"RESUME", "CALL", "CALL_FUNCTION_EX"}


class Struck(Exception):  # noqa: N818 - it is no error
    """The exception of the handler."""


def _strike(*_: object) -> None:
    raise Struck


class Interrupter:
    """Raises the signal once, at one step."""

    def __init__(self, at: int) -> None:
        self._at: Final = at
        #: Number of steps so far.
        self.steps = 0
        #: The place where it was raised.
        self.where = "nowhere"
        #: The opcodes of each frame by their offset.
        self._opcodes: dict[FrameType, dict[int, str]] = {}
        #: The last opcode of each frame; "" after it entered a Python function.
        self._last: dict[FrameType, str] = {}

    def trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        """Process an event of `sys.settrace`."""
        if event == "call":
            path, is_of_traced = frame.f_code.co_filename, frame.f_back in self._last
            if is_of_traced:
                self._last[frame.f_back] = ""
            if not _is_traced(path) and not (is_of_traced and path.endswith(_CALLED)):
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            self._opcodes[frame] = _opcodes(frame.f_code)
            self._last[frame] = "RESUME"
        elif event == "opcode":
            name = self._opcodes[frame][frame.f_lasti]
            last, self._last[frame] = self._last[frame], name
            if "JUMP_BACKWARD" in name or last in _AFTER:
                self._step(frame)
        elif event == "return":
            self._last.pop(frame, None)
            self._opcodes.pop(frame, None)
        return self.trace

    def forget(self) -> None:
        """Drop all frames, so that their objects can be collected."""
        self._last.clear()
        self._opcodes.clear()

    def _step(self, frame: FrameType) -> None:
        self.steps += 1
        if self.steps == self._at:
            self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
            signal.raise_signal(SIGNAL)
            # The handler was delayed. The rest of the run has no further step of interest.
            sys.settrace(None)


@cache
def _is_traced(path: str) -> bool:
    return "/tests/" not in path and any(part in path for part in _TRACED)


@cache
def _opcodes(code: CodeType) -> dict[int, str]:
    return {each.offset: each.opname for each in dis.get_instructions(code)}


@contextlib.contextmanager
def _traced(interrupter: Interrupter) -> Iterator[None]:
    former = sys.gettrace()
    sys.settrace(interrupter.trace)
    try:
        yield
    finally:
        sys.settrace(former)
        interrupter.forget()


def interrupted(run: Callable[[], None], check: Callable[[], None], stride: int = 1) -> int:
    """Interrupt a run at each of its steps; return the number of steps.

    Args:
        run: does the same each time, and continues after a `Struck`.
        check: asserts what must hold after it; is not interrupted.
        stride: the distance between two interrupted steps.

    """
    former = signal.signal(SIGNAL, _strike)
    at = 1
    # Each run is followed by a collection, which only needs to look at new objects.
    gc.collect()
    gc.freeze()
    try:
        while True:
            interrupter = Interrupter(at)
            with _traced(interrupter):
                run()
            assert signal.getsignal(SIGNAL) is _strike, f"the handler was not put back at {at}"
            try:
                check()
            except BaseException as error:
                error.add_note(f"interrupted at step {at}, in {interrupter.where}")
                raise
            if interrupter.steps < at:
                return interrupter.steps
            at += stride
    finally:
        gc.unfreeze()
        signal.signal(SIGNAL, former)
