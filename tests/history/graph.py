"""Precedence graph of transactions, and its cycles (strongly connected components).

Nodes are transactions, by their index, and *joints*: auxiliary nodes that are no transaction. With
a joint, edges from n to m transactions need n + m edges. All edges out of a joint have the kind of
the edges into it. Invariant: a path through joints from T to U means that T precedes U; a path from
T to itself exists only if T precedes itself.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Kinds of edges. The source wrote a version before the one that the target wrote; wrote what the
#: target read; read a version before the one that the target wrote.
WW, WR, RW = 1, 2, 4
#: The same process did one after the other; one returned before the other was called; the commit
#: record of one is before the other's.
PROCESS, REALTIME, LOG = 8, 16, 32
ALL: Final = 63
_BITS: Final = 6
#: Maximum ratio of edges to nodes for direct edges from many to many; above it, a joint is used.
_DENSE: Final = 4
#: The last node of a cycle.
_END: Final = -1


class Cycle(NamedTuple):
    """The transactions of a cycle, and the kind of the edge that leaves each."""

    nodes: list[int]
    kinds: list[int]


class Graph:
    """Edges between transactions."""

    def __init__(self, transactions: int) -> None:
        """Make a graph without edges; nodes below `transactions` are those."""
        self.transactions: Final = transactions
        #: From a node to its edges: the target times 64 plus the kind.
        self._out: Final[list[list[int]]] = [[] for _ in range(transactions)]

    def joint(self) -> int:
        """Return a new node that is no transaction."""
        self._out.append([])
        return len(self._out) - 1

    def add(self, source: int, target: int, kind: int) -> None:
        """Add an edge; none from a node to itself."""
        if source != target:
            self._out[source].append(target << _BITS | kind)

    def add_all(self, sources: Sequence[int], targets: Sequence[int], kind: int) -> None:
        """Add an edge from each source to each target but itself, by joints if they are many."""
        if len(sources) * len(targets) <= _DENSE * (len(sources) + len(targets)):
            for source in sources:
                for target in targets:
                    self.add(source, target, kind)
            return
        # A transaction on both sides gets edges from those before it and from those after it.
        both = set(sources) & set(targets)
        last = self._chain(sources, both, kind)
        self._chain(sources[::-1], both, kind)
        for target in targets:
            if target not in both:
                self.add(last, target, kind)

    def _chain(self, sources: Sequence[int], targets: set[int], kind: int) -> int:
        """Add edges from each source to all later targets; return the last joint."""
        last = -1
        for source in sources:
            joint = self.joint()
            if last >= 0:
                self.add(last, joint, kind)
                if source in targets:
                    self.add(last, source, kind)
            self.add(source, joint, kind)
            last = joint
        return last

    def edges(self) -> int:
        """Return how many edges there are."""
        return sum(map(len, self._out))

    def direct(self, among: set[int], mask: int) -> Iterator[tuple[int, int, int]]:
        """Go through the edges of these kinds from a transaction to another: both, and the kind."""
        for source in sorted(node for node in among if node < self.transactions):
            for edge in self._out[source]:
                target, kind = edge >> _BITS, edge & ALL
                if kind & mask and target < self.transactions and target in among:
                    yield source, target, kind

    def components(self, mask: int = ALL, among: set[int] | None = None) -> list[list[int]]:
        """Return the sets of nodes that all reach each other, if two transactions are in them.

        Tarjan's algorithm (1972), without recursion: linear in nodes and edges.

        Args:
            mask: kinds of edges that count.
            among: nodes that count; None: all.

        """
        out, found = self._out, []
        size = len(out)
        number = [0] * size  # in the order of the search, from 1; 0: not seen
        low = [0] * size
        open_ = bytearray(size)  # on `stack`: seen, and its component not known yet
        stack: list[int] = []
        count = 0
        for root in range(self.transactions) if among is None else sorted(among):
            if number[root]:
                continue
            count += 1
            number[root] = low[root] = count
            stack.append(root)
            open_[root] = 1
            path = [root]
            edges = [iter(out[root])]
            while path:
                node = path[-1]
                for edge in edges[-1]:
                    if not edge & mask:
                        continue
                    target = edge >> _BITS
                    if not number[target]:
                        if among is not None and target not in among:
                            continue
                        count += 1
                        number[target] = low[target] = count
                        stack.append(target)
                        open_[target] = 1
                        path.append(target)
                        edges.append(iter(out[target]))
                        break
                    if open_[target] and number[target] < low[node]:
                        low[node] = number[target]
                else:
                    path.pop()
                    edges.pop()
                    if path and low[node] < low[path[-1]]:
                        low[path[-1]] = low[node]
                    if low[node] == number[node]:
                        component = self._popped(stack, open_, node)
                        if component:
                            found.append(component)
        return found

    def _popped(self, stack: list[int], open_: bytearray, node: int) -> list[int]:
        """Take a component off the stack; empty if it has less than two transactions."""
        if stack[-1] == node:
            open_[stack.pop()] = 0
            return []
        start = len(stack) - 1
        while stack[start] != node:
            start -= 1
        component = stack[start:]
        del stack[start:]
        for member in component:
            open_[member] = 0
        many = sum(member < self.transactions for member in component) > 1
        return component if many else []

    def cycle(
        self, start: int, first: int, mask: int, among: set[int], below: int
    ) -> tuple[Cycle | None, int]:
        """Return the shortest cycle from a transaction, and the number of visited nodes.

        Args:
            start: the transaction.
            first: allowed kinds of the first edge.
            mask: allowed kinds of the other edges.
            among: allowed nodes.
            below: only cycles with fewer transactions than this.

        """
        came: dict[int, tuple[int, int]] = {}
        # Nodes, each with the steps that lead there.
        queue = deque([(start, 0)])
        settled: set[int] = set()
        while queue:
            node, steps = queue.popleft()
            if node == _END:
                return self._traced(start, came), len(settled)
            if node in settled:
                continue
            settled.add(node)
            is_joint = node >= self.transactions
            if not is_joint:
                steps += 1
                if steps >= below:
                    continue
            wanted = ALL if is_joint else first if node == start else mask
            for edge in self._out[node]:
                target = edge >> _BITS
                if not edge & wanted or target not in among:
                    continue
                if target == start:
                    target = _END
                if target not in settled and (is_joint or target not in came):
                    came[target] = (node, edge & ALL)
                    # From a joint on costs nothing: a step is from one transaction to the next.
                    if is_joint:
                        queue.appendleft((target, steps))
                    else:
                        queue.append((target, steps))
        return None, len(settled)

    def _traced(self, start: int, came: dict[int, tuple[int, int]]) -> Cycle:
        nodes, kinds = [], []
        node = _END
        while node != start:
            node, kind = came[node]
            if node < self.transactions:
                nodes.append(node)
                kinds.append(kind)
        return Cycle(nodes[::-1], kinds[::-1])
