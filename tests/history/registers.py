"""Register keys: transactions write unique values, and the history reveals part of their order.

The order is inferred from four facts. A key has no value at first. A transaction that reads a value
and writes another writes the later one. Positions order commits. Without positions, a write that
returned before the call of another comes first. All four hold in every strictly serializable store,
so a correct store is never blamed (Kingsbury and Alvaro, *Elle*, 2020, sections 4.3 and 5).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.history.graph import RW, WR, WW
from tests.history.transactions import ABORTED, IN_DOUBT
from tests.history.violation import END, Violation

if TYPE_CHECKING:
    from tests.history.graph import Graph
    from tests.history.transactions import Transaction


class Written(NamedTuple):
    """The transaction that wrote a value, and whether it is its last write to the key."""

    by: Transaction
    is_last: bool


@dataclass(slots=True)
class RegisterKey:
    """The facts about one register key."""

    key: str
    writes: dict[Any, Written] = field(default_factory=dict)
    #: By value: the transactions that read it before their own first write. None: no value.
    readers: dict[Any, list[Transaction]] = field(default_factory=dict)
    #: From a value to what one transaction, which had read it, wrote.
    rewritten: list[tuple[Any, Any]] = field(default_factory=list)
    #: From a value to values that are later.
    later: dict[Any, set[Any]] = field(default_factory=dict)


class Registers:
    """The keys of a history to which was written."""

    def __init__(self) -> None:
        self.keys: dict[str, RegisterKey] = {}
        self._violations: list[Violation] = []

    def key(self, key: str) -> RegisterKey:
        """Return the facts about a key."""
        found = self.keys.get(key)
        if found is None:
            found = self.keys[key] = RegisterKey(key)
        return found

    def take(self, transaction: Transaction, key: str, steps: list[tuple[str, Any]]) -> None:
        """Add a transaction's steps on one key, in order: ("w", value), ("r", value)."""
        found = self.key(key)
        knows, wrote, has_read = False, False, False
        value = first = None
        for kind, what in steps:
            if kind == "w":
                if what in found.writes:
                    self._report_violation(
                        "history", transaction, f"value {what} of {key} comes twice"
                    )
                    continue
                if wrote:
                    found.writes[value] = Written(transaction, is_last=False)
                found.writes[what] = Written(transaction, is_last=True)
                value, knows, wrote = what, True, True
            elif not knows:
                found.readers.setdefault(what, []).append(transaction)
                value = first = what
                knows = has_read = True
            elif what != value:
                text = f"read {key} as {what}, but its own operations require {value}"
                self._report_violation("internal", transaction, text)
        if has_read and wrote:
            found.rewritten.append((first, value))

    def _report_violation(self, rule: str, transaction: Transaction, text: str) -> None:
        source = transaction.result_source or transaction.source
        self._violations.append(Violation(rule, f"{transaction} {text}", source))

    def prove(self) -> None:
        """Find the transactions in doubt that took effect."""
        for found in self.keys.values():
            for value, readers in found.readers.items():
                written = found.writes.get(value)
                if written is None or written.by.state != IN_DOUBT:
                    continue
                if any(reader is not written.by for reader in readers):
                    written.by.is_proven = True

    def judge(self, graph: Graph) -> list[Violation]:
        """Add the precedences to a graph; return the errors that no order can explain."""
        for found in self.keys.values():
            self._values(found)
            _order(found)
            cycle = _cycle(found.later)
            if cycle is None:
                _add(found, graph)
            else:
                values = " before ".join(map(str, cycle))
                by = found.writes[cycle[1]].by
                text = f"wrote {found.key}, and its values have no possible order: {values}"
                self._report_violation("incompatible-order", by, text)
        for found in self.keys.values():
            for value, readers in found.readers.items():
                written = found.writes.get(value)
                if written is not None and written.by.took_effect:
                    for reader in readers:
                        graph.add(written.by.index, reader.index, WR)
        return self._violations

    def _values(self, found: RegisterKey) -> None:
        """Report reads of values that must not be visible."""
        for value, readers in found.readers.items():
            if value is None:
                continue
            written, reader = found.writes.get(value), readers[0]
            if written is None:
                text = f"read {value} in {found.key}, a value that was never written"
                self._report_violation("phantom", reader, text)
            elif written.by.state == ABORTED:
                text = f"read {value} in {found.key}, which {written.by} wrote, and was aborted"
                self._report_violation("G1a", reader, text)
            elif not written.is_last:
                text = f"read {value} in {found.key}, while {written.by} had not yet written all"
                self._report_violation("G1b", reader, text)

    # --- in words ---

    def why(self, before: Transaction, after: Transaction, kind: int) -> str | None:
        """Return why one comes before the other; None: not because of a register."""
        for key in dict.fromkeys(key for _, key, _ in after.steps):
            found = self.keys.get(key)
            text = None if found is None else _why(found, before, after, kind)
            if text is not None:
                return text
        return None


def _final(found: RegisterKey) -> list[tuple[Any, Transaction]]:
    """Return the values that became versions, and their writers."""
    return [
        (value, written.by)
        for value, written in found.writes.items()
        if written.is_last and written.by.took_effect
    ]


def _order(found: RegisterKey) -> None:
    """Find which values are later than which."""
    final = _final(found)
    versions = {value for value, _ in final}
    later = found.later
    for before, after in found.rewritten:
        if after in versions and (before is None or before in versions):
            later.setdefault(before, set()).add(after)
    placed = sorted((by.position, value) for value, by in final if by.position)
    for (_, before), (_, after) in pairwise(placed):
        later.setdefault(before, set()).add(after)
    if len(placed) < len(final):
        _by_time(final, later)
    not_first = {v for before, values in later.items() if before is not None for v in values}
    later.setdefault(None, set()).update(versions - not_first)


def _by_time(final: list[tuple[Any, Transaction]], later: dict[Any, set[Any]]) -> None:
    """Add the precedences of writes that were called after another write had returned.

    Edges start only at the *frontier*, the writes without a successor; the rest follows.
    """
    returned = sorted(((by.at, value, by) for value, by in final if by.at != END), key=_at)
    frontier: dict[Any, Transaction] = {}
    done = 0
    for value, by in sorted(final, key=lambda row: row[1].called):
        while done < len(returned) and returned[done][0] < by.called:
            _, mine, me = returned[done]
            frontier = {v: t for v, t in frontier.items() if not t.at < me.called}
            frontier[mine] = me
            done += 1
        for before in frontier:
            later.setdefault(before, set()).add(value)


def _at(row: tuple[int, Any, Transaction]) -> int:
    return row[0]


def _cycle(later: dict[Any, set[Any]]) -> list[Any] | None:
    """Return values that are each before the next, the first one again at the end; or None."""
    before: dict[Any, int] = {}
    for values in later.values():
        for value in values:
            before[value] = before.get(value, 0) + 1
    ready = [value for value in later if value not in before]
    while ready:
        for value in later.get(ready.pop(), ()):
            before[value] -= 1
            if not before[value]:
                del before[value]
                ready.append(value)
    if not before:
        return None
    # Each one left has one left before it: backwards until one comes again.
    earlier = {value: v for v, values in later.items() if v in before for value in values}
    path = [next(value for value in before if value in earlier)]
    while earlier[path[-1]] not in path:
        path.append(earlier[path[-1]])
    again = earlier[path[-1]]
    return [again, *path[path.index(again) :][::-1]]


def _add(found: RegisterKey, graph: Graph) -> None:
    for value, values in found.later.items():
        after = [found.writes[v].by.index for v in values]
        if value is not None:
            for index in after:
                graph.add(found.writes[value].by.index, index, WW)
        readers = [reader.index for reader in found.readers.get(value, ())]
        graph.add_all(readers, after, RW)


def _why(found: RegisterKey, before: Transaction, after: Transaction, kind: int) -> str | None:
    read = {
        t.index: value
        for value, readers in found.readers.items()
        for t in readers
        if t is before or t is after
    }
    if kind == WR:
        written = found.writes.get(read.get(after.index))
        if written is not None and written.by is before:
            return f"wrote {read[after.index]} to {found.key}, which the next one read"
        return None
    if kind == RW and before.index in read:
        value = read[before.index]
        for then in found.later.get(value, ()):
            if found.writes[then].by is after:
                return f"read {found.key} as {value}, before the next one wrote {then}"
    if kind == WW:
        for value, written in found.writes.items():
            for then in found.later.get(value, ()) if written.by is before else ():
                if found.writes[then].by is after:
                    return f"wrote {value} to {found.key}, before the next one wrote {then}"
    return None
