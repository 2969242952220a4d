"""A signal whose handler raises, at every step of a run where CPython could run a handler.

CPython runs the handlers of signals in the main thread at the beginning of a function, at the jump
back of a loop, and after a call of a function that is written in C. `interrupted` has a run traced
opcode by opcode, raises a signal at the n-th such place, for n = 1, 2, ... until a run has fewer.
Whether the handler runs then, or is held back, is up to what is tested.
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
#: Where the steps are counted: our clients, and what they are made of.
_TRACED: Final = (
    "/ziplog/client/",
    "/ziplog/runtime/transport.py",
    "/logdb/client/",
    "/concurrent/futures/_base.py",
    "/threading.py",
    "/weakref.py",
)
_AFTER: Final = {"RESUME", "CALL", "CALL_FUNCTION_EX"}


class Struck(Exception):  # noqa: N818 - it is no error
    """What the handler raises."""


def _strike(*_: object) -> None:
    raise Struck


class Interrupter:
    """Raises the signal once, at one step."""

    def __init__(self, at: int) -> None:
        self._at: Final = at
        #: Steps so far.
        self.steps = 0
        #: Where it was raised.
        self.where = "nowhere"
        #: The opcode that each frame ran last; "" if it entered a function that is no C.
        self._last: dict[FrameType, str] = {}

    def trace(self, frame: FrameType, event: str, _arg: object) -> Any:
        """Take an event of `sys.settrace`."""
        if event == "call":
            if frame.f_back in self._last:
                self._last[frame.f_back] = ""
            path = frame.f_code.co_filename
            if "/tests/" in path or not any(part in path for part in _TRACED):
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            self._last[frame] = "RESUME"
        elif event == "opcode":
            name = _names(frame.f_code)[frame.f_lasti]
            last, self._last[frame] = self._last[frame], name
            if "JUMP_BACKWARD" in name or last in _AFTER:
                self._step(frame)
        elif event == "return":
            self._last.pop(frame, None)
        return self.trace

    def forget(self) -> None:
        """Keep no frame alive: what it holds could not be collected."""
        self._last.clear()

    def _step(self, frame: FrameType) -> None:
        self.steps += 1
        if self.steps == self._at:
            self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
            signal.raise_signal(SIGNAL)


@cache
def _names(code: CodeType) -> dict[int, str]:
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
    """Interrupt a run at each of its steps; returns how many there were.

    Args:
        run: does the same each time, and goes on behind a `Struck`.
        check: asserts what must hold after it; is not interrupted.
        stride: how far one interrupted step is from the next.

    """
    former = signal.signal(SIGNAL, _strike)
    at = 1
    # Each run is followed by a collection, which needs to look at what is new only.
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
