"""Isolation checker: are transactions strictly serializable, as observed by clients?

The precedence of transactions follows from reads, from the order within a process, from real time,
and from the positions of commits. A cycle of precedences means that no serial order exists; its
edges determine the name of the anomaly (Adya 1999; Kingsbury and Alvaro, *Elle*, 2020). See
docs/history.md.

Rule: what a history leaves open is decided in the store's favour. Linear in the history's size.
"""

from __future__ import annotations

from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, Final

from tests.history.bank import Bank
from tests.history.graph import LOG, PROCESS, REALTIME, RW, WR, WW, Cycle, Graph
from tests.history.lists import Lists
from tests.history.registers import Registers
from tests.history.transactions import ABORTED, COMMITTED
from tests.history.violation import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.history.observed import Observed
    from tests.history.transactions import Transaction

#: Kinds of edges in addition to the data's, weakest guarantee first.
_LEVELS: Final = (0, PROCESS, PROCESS | REALTIME, PROCESS | REALTIME | LOG)
#: Suffix of an anomaly's name, by its strongest kind of edge.
_ENDS: Final = ((LOG, "-log"), (REALTIME, "-realtime"), (PROCESS, "-process"))
#: Kinds of which one edge leads off, and kinds of the others; the worst first.
_SHAPES: Final = ((WW, WW), (WR, WW | WR), (RW, WW | WR), (RW, WW | WR | RW))
#: Components that are examined, and nodes that are visited to find a shortest cycle in each.
_MAX_EXAMINED: Final = 50
_VISITS: Final = 300_000
#: A cycle of more transactions is hard to understand.
_LONG: Final = 4
#: Maximum number of transactions of a cycle that a report describes.
_MAX_DESCRIBED: Final = 12
_WORDS: Final = {
    PROCESS: "and the next one is of the same process, later",
    REALTIME: "and returned before the next one was called",
    LOG: "and its commit record is before the next one's",
}


def check(observed: Observed) -> list[Violation]:
    """Hold the transactions of a history against strict serializability."""
    return Judgement(observed).violations


class Judgement:
    """The violations in a history's transactions."""

    def __init__(self, observed: Observed) -> None:
        """Judge them."""
        self._observed: Final = observed
        self._all: Final = observed.transactions.all
        self.violations: Final[list[Violation]] = []
        self._lists: Final = Lists()
        self._registers: Final = Registers()
        self._bank: Final = Bank()
        if self._all:
            self._take()
            self._judge()

    def _take(self) -> None:
        of_lists = {
            key
            for transaction in self._all
            for kind, key, value in transaction.steps
            if kind == "append" or (kind == "r" and isinstance(value, list))
        }
        for transaction in self._all:
            keys: dict[str, list[tuple[str, Any]]] = {}
            for kind, key, value in transaction.steps:
                if kind in {"append", "r", "w"}:
                    keys.setdefault(key, []).append((kind, value))
                elif not self._bank.take(transaction, kind, key, value):
                    self._report_violation(
                        "history", transaction, f"has a step of no known kind, {kind}"
                    )
            for key, steps in keys.items():
                model = self._lists if key in of_lists else self._registers
                wrong = "w" if key in of_lists else "append"
                if any(kind == wrong for kind, _ in steps):
                    self._report_violation(
                        "history", transaction, f"uses {key} as a list and as a register"
                    )
                else:
                    model.take(transaction, key, steps)

    def _report_violation(self, rule: str, transaction: Transaction, text: str) -> None:
        source = transaction.result_source or transaction.source
        self.violations.append(Violation(rule, f"{transaction} {text}", source))

    def _judge(self) -> None:
        self._lists.prove()
        self._registers.prove()
        graph = Graph(len(self._all))
        last_called: dict[str, int] = {}
        for transaction in self._all:
            if transaction.state == COMMITTED:
                for kind, key, _ in transaction.steps:
                    if kind == "r":
                        last_called[key] = max(last_called.get(key, 0), transaction.called)
        self.violations.extend(self._lists.judge(graph, last_called))
        self.violations.extend(self._registers.judge(graph))
        self.violations.extend(self._bank.judge())
        self._add_processes(graph)
        self._add_real_time(graph)
        self._add_positions(graph)
        self._search(graph)

    # --- order by other things than data ---

    def _add_processes(self, graph: Graph) -> None:
        by_process: dict[int, list[Transaction]] = {}
        for transaction in self._all:
            if transaction.took_effect:
                by_process.setdefault(transaction.process, []).append(transaction)
        for transactions in by_process.values():
            _add_order(graph, transactions, PROCESS)

    def _add_real_time(self, graph: Graph) -> None:
        """Add edges from each transaction to all transactions called after its return.

        A joint represents a moment. Transactions that returned before it have an edge to it. It has
        edges to those called after it, and to the next joint: about three edges per transaction.
        """
        called = sorted((t for t in self._all if t.took_effect), key=lambda t: t.called)
        returned = sorted((t for t in called if t.state == COMMITTED), key=lambda t: t.at)
        moment, is_new, done = -1, False, 0
        for transaction in called:
            while done < len(returned) and returned[done].at < transaction.called:
                if not is_new:
                    joint = graph.joint()
                    if moment >= 0:
                        graph.add(moment, joint, REALTIME)
                    moment, is_new = joint, True
                graph.add(returned[done].index, moment, REALTIME)
                done += 1
            if moment >= 0:
                graph.add(moment, transaction.index, REALTIME)
            is_new = False

    def _add_positions(self, graph: Graph) -> None:
        placed = sorted((t for t in self._all if t.position), key=lambda t: t.position)
        _add_order(graph, placed, LOG)
        for before, after in pairwise(placed):
            if before.position == after.position:
                self._report_violation(
                    "position", after, f"has the position of {before}, {after.position}"
                )

    # --- cycles ---

    def _search(self, graph: Graph) -> None:
        components = sorted(graph.components(), key=len)
        for component in components[:_MAX_EXAMINED]:
            self._examine(graph, component)
        if len(components) > _MAX_EXAMINED:
            count = len(components) - _MAX_EXAMINED
            source = self._all[min(components[_MAX_EXAMINED])].source
            self.violations.append(Violation("cycle", f"{count} more groups in cycles", source))

    def _examine(self, graph: Graph, component: list[int]) -> None:
        """Report the shortest cycle of each shape, by the weakest promise that is broken."""
        among = set(component)
        for extras in _LEVELS:
            found = self._of_each_shape(graph, among, extras)
            if found:
                break
        if min(len(cycle.nodes) for cycle in found.values()) > _LONG:
            found |= self._of_two(graph, among)
        for name, cycle in found.items():
            self._report(name, cycle)

    def _of_two(self, graph: Graph, among: set[int]) -> dict[str, Cycle]:
        """Return cycles of a transaction and one that it must precede, and that was over before.

        By data alone, an old read may show in long cycles only.
        """
        found: dict[str, Cycle] = {}
        for source, target, kind in graph.direct(among, WW | WR | RW):
            before, after = self._all[source], self._all[target]
            if after.at < before.called:
                cycle = Cycle([source, target], [kind, REALTIME])
            elif after.position and after.position < before.position:
                cycle = Cycle([source, target], [kind, LOG])
            else:
                continue
            found.setdefault(self._name(cycle), cycle)
        return found

    def _of_each_shape(self, graph: Graph, among: set[int], extras: int) -> dict[str, Cycle]:
        found: dict[str, Cycle] = {}
        for shape, others in _SHAPES:
            # The positions are an order of writes, too.
            first = shape | LOG if shape == WW and extras & LOG else shape
            for part in graph.components(first | others | extras, among):
                cycle = self._shortest(graph, part, first, others | extras)
                if cycle is not None:
                    name = self._name(cycle)
                    if name not in found or len(cycle.nodes) < len(found[name].nodes):
                        found[name] = cycle
            if any(name.startswith("G-single") for name in found):
                break
        return found

    def _shortest(self, graph: Graph, part: list[int], first: int, others: int) -> Cycle | None:
        among = set(part)
        best: Cycle | None = None
        shortest, budget = graph.transactions + 1, _VISITS
        for start in sorted(part):
            if start >= graph.transactions or budget < 0 or shortest == 2:
                break
            cycle, visited = graph.cycle(start, first, others, among, shortest)
            budget -= visited
            if cycle is not None:
                best, shortest = cycle, len(cycle.nodes)
        return best

    def _name(self, cycle: Cycle) -> str:
        kinds = set(cycle.kinds)
        anti = cycle.kinds.count(RW)
        name = "G2" if anti > 1 else "G-single" if anti else "G1c" if WR in kinds else "G0"
        suffix = next((end for kind, end in _ENDS if kind in kinds), "")
        is_old = any(self._all[node].state == ABORTED for node in cycle.nodes)
        return name + suffix + ("-aborted" if is_old else "")

    def _report(self, name: str, cycle: Cycle) -> None:
        words = "; then ".join(islice(self._words(cycle), _MAX_DESCRIBED))
        if len(cycle.nodes) > _MAX_DESCRIBED:
            words += f"; and {len(cycle.nodes) - _MAX_DESCRIBED} more, the last of"
        first = self._all[cycle.nodes[0]]
        text = f"{len(cycle.nodes)} transactions each of which must come before the next: {words}"
        self.violations.append(Violation(name, f"{text}; which is the first again", first.source))

    def _words(self, cycle: Cycle) -> Iterator[str]:
        for place, (node, kind) in enumerate(zip(cycle.nodes, cycle.kinds, strict=True)):
            before = self._all[node]
            after = self._all[cycle.nodes[(place + 1) % len(cycle.nodes)]]
            why = _WORDS.get(kind) or self._why(before, after, kind)
            where = self._observed.where(before.result_source or before.source)
            yield f"{before} [{where}] {why}"

    def _why(self, before: Transaction, after: Transaction, kind: int) -> str:
        for model in (self._lists, self._registers):
            found = model.why(before, after, kind)
            if found is not None:
                return found
        return "comes before the next one"


def _add_order(graph: Graph, transactions: list[Transaction], kind: int) -> None:
    """Add edges from each committed transaction to all at later positions."""
    last = -1
    for transaction in transactions:
        if last >= 0:
            graph.add(last, transaction.index, kind)
        # A transaction in doubt may take effect after later operations of its process.
        if transaction.state == COMMITTED:
            joint = graph.joint()
            if last >= 0:
                graph.add(last, joint, kind)
            graph.add(transaction.index, joint, kind)
            last = joint
