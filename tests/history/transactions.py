"""The transactions of a history: what each one did, and what became of it.

Rule: here is only put together what belongs together (`invoke` with `ok`, `fail` or `info`); what
it means is for `history.isolation`. A transaction without a result is one of unknown outcome.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.history.violation import END

if TYPE_CHECKING:
    from tests.history import events
    from tests.history.events import Step

#: Outcomes of a transaction.
COMMITTED, ABORTED, IN_DOUBT = 1, 2, 3
#: Public exceptions of LogDB, in addition to those of the log.
PUBLIC_ERRORS: Final = frozenset({"TransactionAborted", "SnapshotExpired"})
_SHOWN: Final = 6
_STATES: Final = {COMMITTED: "", ABORTED: "aborted ", IN_DOUBT: "in doubt "}


@dataclass(slots=True)
class Transaction:
    """One transaction."""

    #: Its place among all of the history, from 0.
    index: int
    #: The calling thread; it executes one transaction at a time.
    process: int
    called: int
    steps: list[Step]
    #: Of its call; of its result.
    source: int
    result_source: int = 0
    #: Time of its result; `END`: there is none.
    at: int = END
    state: int = IN_DOUBT
    #: The gsn of its commit record; 0: not known.
    position: int = 0
    #: In doubt, but a read returned one of its writes.
    is_proven: bool = False

    @property
    def took_effect(self) -> bool:
        """Whether it certainly was committed."""
        return self.state == COMMITTED or self.is_proven

    def __str__(self) -> str:
        steps = [_shown(step) for step in self.steps[:_SHOWN]]
        more = ["..."] if len(self.steps) > _SHOWN else []
        return f"{_STATES[self.state]}{{{', '.join(steps + more)}}}"


def _shown(step: Step) -> str:
    kind, key, value = step
    return f"{kind} {key} {short(value)}"


def short(value: object) -> str:
    """Return a value as text; of a long list only its end."""
    if isinstance(value, list) and len(value) > _SHOWN:
        return f"[... {', '.join(map(str, value[-_SHOWN:]))}]"
    return str(value)


class Transactions:
    """All transactions of a history, in the order in which their calls were read."""

    def __init__(self) -> None:
        self.all: Final[list[Transaction]] = []
        #: From a file's base and an operation's number to the transaction that has no result yet.
        self._open: Final[dict[tuple[int, int], Transaction]] = {}

    def invoked(self, event: events.Invoke, base: int, source: int) -> None:
        """Add a call from the file with the source index `base`."""
        # Without a result, only its writes count.
        steps = [step for step in event.steps if step[0] != "r"]
        transaction = Transaction(len(self.all), base + event.process, event.at, steps, source)
        self.all.append(transaction)
        self._open[base, event.op] = transaction

    def on_result(
        self, event: events.Ok | events.Fail | events.Info, base: int, source: int
    ) -> None:
        """Take a result.

        Raises:
            KeyError: there is no call for it.

        """
        transaction = self._open.pop((base, event.op))
        transaction.result_source = source
        if event.steps:
            transaction.steps = event.steps

    def committed(self, event: events.Ok, base: int, source: int) -> None:
        """Take an `ok`."""
        transaction = self._open[base, event.op]
        self.on_result(event, base, source)
        transaction.state, transaction.at = COMMITTED, event.at
        transaction.position = event.position

    def failed(self, event: events.Fail, base: int, source: int) -> None:
        """Take a `fail`."""
        transaction = self._open[base, event.op]
        self.on_result(event, base, source)
        transaction.state, transaction.at = ABORTED, event.at
