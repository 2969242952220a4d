"""The recorded operations of a database's clients: reads, writes and outcomes.

Each is recorded twice: as a `Deed`, to be checked against the model of the log, and as lines of the
history, to be checked by `tests/history`. Calls and results are numbered in the order in which
they happen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from logdb.values import decode_value
from ziplog.errors import OutcomeUnknownError

if TYPE_CHECKING:
    from tests.history.events import Step
    from tests.sim.history import History
    from tests.simulator.kernel import Kernel

Outcome = Literal["under way", "committed", "aborted", "in doubt"]


@dataclass
class Deed:
    """One transaction, single read, single write, or snapshot."""

    client: str
    #: Its number in the client's file of the history.
    op: int
    kind: str
    #: The number of its call.
    called: int
    #: The values read, before its own writes; None: absent.
    reads: dict[bytes, bytes | None] = field(default_factory=dict)
    #: None: a deletion.
    writes: dict[bytes, bytes | None] = field(default_factory=dict)
    #: The same for the history.
    steps: list[Step] = field(default_factory=list)
    outcome: Outcome = "under way"
    #: The number of its result; 0: none.
    returned: int = 0
    #: The gsn of its commit record, or of the state that a read-only one read. 0: unknown.
    gsn: int = 0

    def read(self, key: bytes, value: bytes | None) -> None:
        """Record a read; a read of its own write is ignored."""
        if key in self.writes:
            return
        known = self.reads.setdefault(key, value)
        assert known == value, f"{self} read {key!r} as {known!r}, and then as {value!r}"
        kind, name = key.split(b"/")[0], key.decode()
        if kind == b"list":
            self.steps.append(("r", name, [] if value is None else decode_value(value)))
        elif kind == b"register":
            self.steps.append(("r", name, None if value is None else decode_value(value)))

    def write(self, key: bytes, value: bytes | None) -> None:
        """Record a write."""
        kind, name = key.split(b"/")[0], key.decode()
        self.writes[key] = value
        if kind == b"list" and value is not None:
            self.steps.append(("append", name, decode_value(value)[-1]))
        elif kind == b"register" and value is not None:
            self.steps.append(("w", name, decode_value(value)))

    def __str__(self) -> str:
        return (
            f"{self.outcome} {self.kind} [{self.client}:{self.op}] at {self.gsn}"
            f" (reads {_short(self.reads)}, writes {_short(self.writes)})"
        )


def _short(values: dict[bytes, bytes | None]) -> str:
    rows = [
        f"{key.decode()}={'-' if value is None else str(decode_value(value))[-60:]}"
        for key, value in list(values.items())[:6]
    ]
    return "{" + ", ".join(rows) + ("..." if len(values) > 6 else "") + "}"


class Deeds:
    """All recorded operations."""

    def __init__(self, kernel: Kernel, history: History) -> None:
        self._kernel: Final = kernel
        self._history: Final = history
        self.all: Final[list[Deed]] = []
        self._version_count = 0

    def _moment(self) -> int:
        self._version_count += 1
        return self._version_count

    @property
    def open(self) -> list[Deed]:
        """The operations without a result."""
        return [deed for deed in self.all if not deed.returned]

    def begin(self, client: str, lane: int, kind: str) -> Deed:
        """Record a call."""
        op = self._history.invoked(client, self._kernel.now, lane, [])
        deed = Deed(client, op, kind, self._moment())
        self.all.append(deed)
        return deed

    def committed(self, deed: Deed, gsn: int = 0) -> None:
        """Record that an operation took effect, at a position if it is known."""
        self._end(deed, "committed")
        deed.gsn = gsn
        place = gsn if deed.writes else 0
        self._history.committed(deed.client, deed.op, self._kernel.now, deed.steps, place)

    def not_committed(self, deed: Deed, error: BaseException, *, is_known: bool) -> None:
        """Record that it took no effect, or (not `is_known`) that its outcome is unknown."""
        self._end(deed, "aborted" if is_known else "in doubt")
        self._history.not_committed(
            deed.client, deed.op, self._kernel.now, deed.steps, error, is_known=is_known
        )

    def close(self) -> None:
        """Record the intended steps of operations without a result, because their clients died."""
        for deed in self.open:
            self.not_committed(
                deed, OutcomeUnknownError("its client died", shard=0, seq=0), is_known=False
            )

    def _end(self, deed: Deed, outcome: Outcome) -> None:
        assert not deed.returned, f"{deed} has two results"
        deed.returned, deed.outcome = self._moment(), outcome
        self._kernel.record(f"{deed.client}:{deed.op} {outcome}".encode())
        self._kernel.trace(str(deed))
