"""Bank check: transfers between accounts must neither create nor destroy money.

Each transfer adds a line with its own number to the *ledger*, in the transaction that changes the
two balances. Rule: the balances of one read must match their sum and the ledger, and the ledger
must match the results that clients received for their transfers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.history.transactions import ABORTED, COMMITTED
from tests.history.violation import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.history.transactions import Transaction

#: What such a transaction does: opens accounts with these balances; moves [from, to, amount];
#: reads all balances, in order; reads the ledger: {number: [from, to, amount, times]}.
STEPS: Final = frozenset({"accounts", "transfer", "balances", "ledger"})


class Bank:
    """The bank's transactions in a history."""

    def __init__(self) -> None:
        self._opened: list[int] = []
        self._transfers: Final[dict[str, tuple[Transaction, list[int]]]] = {}
        self._reads: Final[dict[int, dict[str, Any]]] = {}
        self._readers: Final[dict[int, Transaction]] = {}

    def take(self, transaction: Transaction, kind: str, key: str, value: Any) -> bool:
        """Take a step; return False if it is none of a bank's."""
        if kind == "accounts":
            self._opened = value
        elif kind == "transfer":
            self._transfers[key] = (transaction, value)
        elif kind in {"balances", "ledger"} and value is not None:
            self._reads.setdefault(transaction.index, {})[kind] = value
            self._readers[transaction.index] = transaction
        return kind in STEPS

    def judge(self) -> list[Violation]:
        """Return the violations."""
        return [
            Violation(rule, f"{reader} {text}", reader.result_source or reader.source)
            for index, read in self._reads.items()
            for reader in [self._readers[index]]
            for rule, text in self._errors(reader, read)
        ]

    def _errors(self, reader: Transaction, read: dict[str, Any]) -> Iterator[tuple[str, str]]:
        balances, ledger = read.get("balances"), read.get("ledger")
        if balances is not None and sum(balances) != sum(self._opened):
            due = sum(self._opened)
            yield "sum", f"read balances of {sum(balances)} together; {due} were paid in"
        if ledger is not None and reader.state == COMMITTED:
            yield from self._check_ledger(reader, ledger)
            if balances is not None:
                yield from self._balanced(balances, ledger)

    def _check_ledger(
        self, reader: Transaction, ledger: dict[str, Any]
    ) -> Iterator[tuple[str, str]]:
        for number, (transfer, terms) in self._transfers.items():
            line = ledger.get(number)
            if line is None:
                if transfer.state == COMMITTED and transfer.at < reader.called:
                    yield "lost-transfer", f"found no line of {number}; {transfer} was committed"
            elif transfer.state == ABORTED:
                yield "phantom-transfer", f"found a line of {number}; {transfer} took no effect"
            elif line[:3] != terms:
                yield "phantom-transfer", f"found {number} as {line}; it was to be {terms}"
        for number, line in ledger.items():
            if number not in self._transfers:
                yield (
                    "phantom-transfer",
                    f"found a line of {number}, a transfer that no client made",
                )
            elif line[3] != 1:
                yield "double-transfer", f"found {number}, made {line[3]} times"

    def _balanced(self, balances: list[int], ledger: dict[str, Any]) -> Iterator[tuple[str, str]]:
        due = list(self._opened)
        for source, target, amount, _ in ledger.values():
            due[source] -= amount
            due[target] += amount
        for account, (is_, should) in enumerate(zip(balances, due, strict=True)):
            if is_ != should:
                text = f"account {account} has {is_}; by the ledger it has {should}"
                yield "double-transfer", text
