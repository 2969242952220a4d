"""List keys: transactions append elements, and reads reveal the order of the appends.

A read of the list [1, 2] reveals the whole history of that version. So all reads of a key must be
prefixes of the longest one, which is the order of the versions (Kingsbury and Alvaro, *Elle*, 2020,
section 4). Elements that no read returned come after all others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.history.graph import RW, WR, WW
from tests.history.transactions import ABORTED, IN_DOUBT, short
from tests.history.violation import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.history.graph import Graph
    from tests.history.transactions import Transaction


class Append(NamedTuple):
    """The transaction that appended an element, and whether it is its last append to the key."""

    by: Transaction
    is_last: bool


@dataclass(slots=True)
class ListKey:
    """The facts about one list key."""

    key: str
    appends: dict[Any, Append] = field(default_factory=dict)
    #: By transaction: the list that it read before its own first append.
    reads: list[tuple[Transaction, list[Any]]] = field(default_factory=list)
    #: The longest list that was read.
    trace: list[Any] = field(default_factory=list)
    #: From an element of it to its place.
    place: dict[Any, int] = field(default_factory=dict)


class Lists:
    """The keys of a history to which was appended."""

    def __init__(self) -> None:
        self.keys: dict[str, ListKey] = {}
        self._violations: list[Violation] = []

    def key(self, key: str) -> ListKey:
        """Return the facts about a key."""
        found = self.keys.get(key)
        if found is None:
            found = self.keys[key] = ListKey(key)
        return found

    def take(self, transaction: Transaction, key: str, steps: list[tuple[str, Any]]) -> None:
        """Add a transaction's steps on one key, in order: ("append", element), ("r", list)."""
        found = self.key(key)
        #: The list that it must see now: its last read and its appends since; None: no read yet.
        seen: list[Any] | None = None
        own: list[Any] = []
        for kind, value in steps:
            if kind == "append":
                if value in found.appends:
                    self._report_violation(
                        "history", transaction, f"element {value} of {key} comes twice"
                    )
                    continue
                own.append(value)
                found.appends[value] = Append(transaction, is_last=True)
                continue
            if value is None:
                continue  # it did not come so far
            if seen is not None:
                if value != seen + own:
                    self._inside(transaction, key, value, seen + own)
            elif value[len(value) - len(own) :] != own:
                self._inside(transaction, key, value, ["...", *own])
            else:
                seen = value[: len(value) - len(own)]
                found.reads.append((transaction, seen))
        for value in own[:-1]:
            found.appends[value] = Append(transaction, is_last=False)

    def _inside(self, transaction: Transaction, key: str, read: list[Any], due: list[Any]) -> None:
        text = f"read {key} as {short(read)}, but its own operations require {short(due)}"
        self._report_violation("internal", transaction, text)

    def _report_violation(self, rule: str, transaction: Transaction, text: str) -> None:
        source = transaction.result_source or transaction.source
        self._violations.append(Violation(rule, f"{transaction} {text}", source))

    def prove(self) -> None:
        """Find each key's versions, and the transactions in doubt that took effect."""
        for found in self.keys.values():
            for _, read in found.reads:
                if len(read) > len(found.trace):
                    found.trace = read
            found.place = {element: place for place, element in enumerate(found.trace)}
            for element in found.place:
                append = found.appends.get(element)
                if append is not None and append.by.state == IN_DOUBT:
                    append.by.is_proven = True

    def judge(self, graph: Graph, last_called: dict[str, int]) -> list[Violation]:
        """Add the precedences to a graph; return the errors that no order can explain.

        Args:
            graph: gets the edges.
            last_called: by key, when the last transaction that read it was called.

        """
        for found in self.keys.values():
            self._elements(found)
            self._order(found, graph, last_called.get(found.key, 0))
        return self._violations

    # --- elements ---

    def _elements(self, found: ListKey) -> None:
        if len(found.place) < len(found.trace):
            reader = next(t for t, read in found.reads if read is found.trace)
            again = next(e for i, e in enumerate(found.trace) if found.place[e] != i)
            text = f"read {found.key}, where {again} occurs twice: {short(found.trace)}"
            self._report_violation("duplicate-append", reader, text)
        seen: set[int] = set()
        for reader, read in found.reads:
            if read != found.trace[: len(read)]:
                self._incompatible(found, reader, read)
            elif len(read) not in seen:
                seen.add(len(read))
                self._intermediate(found, reader, read)
        longest = next((t for t, read in found.reads if read is found.trace), None)
        for element in found.place if longest is not None else ():
            self._written(found, longest, element)

    def _written(self, found: ListKey, reader: Transaction | None, element: Any) -> None:
        assert reader is not None
        append = found.appends.get(element)
        if append is None:
            text = f"read {element} in {found.key}, an element that was never appended"
            self._report_violation("phantom", reader, text)
        elif append.by.state == ABORTED:
            text = f"read {element} in {found.key}, which {append.by} appended, and was aborted"
            self._report_violation("G1a", reader, text)

    def _intermediate(self, found: ListKey, reader: Transaction, read: list[Any]) -> None:
        append = found.appends.get(read[-1]) if read else None
        if append is not None and not append.is_last and append.by is not reader:
            text = f"read {found.key} up to {read[-1]}, while {append.by} had not yet appended all"
            self._report_violation("G1b", reader, text)

    def _incompatible(self, found: ListKey, reader: Transaction, read: list[Any]) -> None:
        pairs = zip(read, found.trace, strict=False)
        place = next(i for i, (mine, theirs) in enumerate(pairs) if mine != theirs)
        text = (
            f"read {found.key} as {short(read)}, another as {short(found.trace)}:"
            f" {read[place]} and {found.trace[place]} are at the same place"
        )
        self._report_violation("incompatible-order", reader, text)
        for element in set(read) - found.place.keys():
            self._written(found, reader, element)

    # --- order ---

    def _order(self, found: ListKey, graph: Graph, last_called: int) -> None:
        writers = self._writers(found)
        known = [by for by in writers if by is not None]
        for before, after in pairwise(known):
            graph.add(before.index, after.index, WW)
        unseen = list(self._unseen(found, last_called))
        for by in unseen if known else ():
            graph.add(known[-1].index, by, WW)
        following: list[Transaction | None] = [None] * (len(writers) + 1)
        for place in range(len(writers) - 1, -1, -1):
            following[place] = writers[place] or following[place + 1]
        last: list[int] = []
        for reader, read in found.reads:
            size = len(read)
            if read != found.trace[:size]:
                continue
            by = writers[size - 1] if size else None
            if by is not None:
                graph.add(by.index, reader.index, WR)
            after = following[size]
            if after is not None:
                graph.add(reader.index, after.index, RW)
            else:
                last.append(reader.index)
        graph.add_all(last, unseen, RW)

    def _writers(self, found: ListKey) -> list[Transaction | None]:
        """Return the appender of each element of the trace; None: no possible one."""
        writers: list[Transaction | None] = []
        for element in found.trace:
            append = found.appends.get(element)
            writers.append(append.by if append is not None and append.by.took_effect else None)
        return writers

    def _unseen(self, found: ListKey, last_called: int) -> Iterator[int]:
        """Report appends that no read returned, although a later read should have."""
        unseen = {
            append.by.index: append.by
            for element, append in found.appends.items()
            if element not in found.place and append.by.took_effect
        }
        for index, by in unseen.items():
            if by.at < last_called:
                text = f"appended to {found.key}, but no read returned it, not even a later one"
                self._report_violation("lost-append", by, text)
            else:
                yield index

    # --- in words ---

    def why(self, before: Transaction, after: Transaction, kind: int) -> str | None:
        """Return why one comes before the other; None: not because of a list."""
        for key in dict.fromkeys(key for _, key, _ in after.steps):
            found = self.keys.get(key)
            text = None if found is None else _why(found, before, after, kind)
            if text is not None:
                return text
        return None


def _why(found: ListKey, before: Transaction, after: Transaction, kind: int) -> str | None:
    read = {t.index: read for t, read in found.reads if t is before or t is after}
    wrote = {
        t.index: [v for k, key, v in t.steps if k == "append" and key == found.key]
        for t in (before, after)
    }
    last = found.place.get
    ends = len(found.trace)
    if kind == WR:
        seen = read.get(after.index)
        if seen and seen[-1] in wrote[before.index]:
            return f"appended {seen[-1]} to {found.key}, which the next one read"
        return None
    for element in wrote[after.index]:
        place = last(element, ends)
        if kind == RW and before.index in read and len(read[before.index]) <= place:
            shown = short(read[before.index])
            return f"read {found.key} as {shown}, before the next one appended {element}"
        if kind == WW:
            for first in wrote[before.index]:
                if last(first, ends) < place:
                    return (
                        f"appended {first} to {found.key}, before the next one appended {element}"
                    )
    return None
