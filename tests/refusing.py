"""Fault injection: the system refuses one call of a storage server, or all from one on.

Every call of `os` and of `pathlib.Path` that may meet a limit of the machine is counted. The
selected calls fail with an error number and do nothing. A sync that succeeds does nothing either:
these tests cut no power.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Calls that need a descriptor, memory or space.
OPENS: Final = ("open",)
WRITES: Final = ("write", "pwrite", "pwritev", "ftruncate", "truncate")
SYNCS: Final = ("fsync", "fdatasync")
NAMES: Final = ("replace", "rename", "unlink", "mkdir", "touch")
READS: Final = ("read", "pread", "statvfs")


class RefusedError(OSError):
    """The error of a refused call."""


class System:
    """Counts system calls, and refuses some."""

    def __init__(self, number: int, error: int, *, lasts: bool = False) -> None:
        """Refuse call `number` (1 is the first), or every call from it on, if it `lasts`."""
        self._number, self._error, self._lasts = number, error, lasts
        self._is_over = False
        #: Number of calls so far.
        self.calls = 0
        #: The name of the first refused call; "": none.
        self.refused = ""

    def end(self) -> None:
        """Refuse nothing from now on."""
        self._is_over = True

    @contextmanager
    def installed(self, names: tuple[str, ...]) -> Iterator[None]:
        """Intercept the process's calls of these names."""
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                target: Any = Path if name in NAMES else os
                patch.setattr(target, name, self._counted(name, getattr(target, name)))
            if "open" in names:
                real = Path.open
                patch.setattr(Path, "open", self._counted("open", real))
            yield

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            is_due = self.calls == self._number or (self._lasts and self.calls > self._number)
            if is_due and not self._is_over:
                self.refused = self.refused or name
                raise RefusedError(self._error, os.strerror(self._error))
            if name in SYNCS:
                return None
            return real(*arguments, **options)

        return call
