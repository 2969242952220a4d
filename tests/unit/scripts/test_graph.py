"""Edges by joints say the same as edges one by one; cycles are found, and the shortest of them."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from tests.history.graph import ALL, REALTIME, RW, WR, WW, Graph

if TYPE_CHECKING:
    from collections.abc import Iterable

Pairs = set[tuple[int, int]]
NODES = 12


def reached(pairs: Iterable[tuple[int, int]]) -> Pairs:
    """Return the transitive closure, computed naively."""
    found = set(pairs)
    for middle in {node for pair in found for node in pair}:
        before = [a for a, b in found if b == middle]
        after = [b for a, b in found if a == middle]
        found |= set(product(before, after))
    return found


def by_joints(graph: Graph) -> Pairs:
    """Return from which transaction to which a path leads through joints only."""
    found = set()
    for start in range(graph.transactions):
        todo, seen = [start], set()
        while todo:
            for edge in graph._out[todo.pop()]:
                target = edge >> 6
                if target < graph.transactions:
                    found.add((start, target))
                elif target not in seen:
                    seen.add(target)
                    todo.append(target)
    return found


@given(st.lists(st.integers(0, 59), unique=True), st.lists(st.integers(0, 59), unique=True))
def test_joints_connect_all_pairs_of_different_transactions(
    sources: list[int], targets: list[int]
) -> None:
    graph = Graph(60)
    graph.add_all(sources, targets, RW)
    assert by_joints(graph) == {(a, b) for a, b in product(sources, targets) if a != b}
    assert graph.edges() <= 8 * (len(sources) + len(targets))


@given(st.sets(st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1)), max_size=30))
def test_components_are_mutually_reachable(pairs: Pairs) -> None:
    graph = Graph(NODES)
    for a, b in pairs:
        graph.add(a, b, WW)
    far = reached((a, b) for a, b in pairs if a != b)
    expected = {
        frozenset(b for b in range(NODES) if (a, b) in far and (b, a) in far) | {a}
        for a in range(NODES)
    }
    found = graph.components()
    assert {frozenset(one) for one in found} == {one for one in expected if len(one) > 1}
    for component in found:
        for start in component:
            cycle, _ = graph.cycle(start, WW, WW, set(component), NODES + 1)
            assert cycle is not None
            assert cycle.nodes[0] == start
            around = zip(cycle.nodes, [*cycle.nodes[1:], start], strict=True)
            assert all(pair in pairs for pair in around)
            least = shortest(start, pairs)
            assert len(cycle.nodes) == least
            assert graph.cycle(start, WW, WW, set(component), least)[0] is None


def shortest(start: int, pairs: Pairs) -> int:
    """Return how many steps lead from a node back to it, at least."""
    steps, front = 0, {start}
    while True:
        steps += 1
        front = {b for a, b in pairs if a in front and a != b}
        if start in front:
            return steps


def test_a_joint_does_not_count_as_a_step() -> None:
    graph = Graph(4)
    for a, b in ((0, 1), (1, 2), (2, 3), (3, 0)):
        graph.add(a, b, WW)
    first, second = graph.joint(), graph.joint()
    graph.add(2, first, REALTIME)
    graph.add(first, second, REALTIME)
    graph.add(second, 0, REALTIME)
    cycle, _ = graph.cycle(0, WW, ALL, set(range(6)), 9)
    assert cycle is not None
    assert cycle.nodes == [0, 1, 2]
    assert cycle.kinds == [WW, WW, REALTIME]


def test_only_allowed_edges_make_a_cycle() -> None:
    graph = Graph(2)
    graph.add(0, 1, WR)
    graph.add(1, 0, RW)
    assert graph.components(WW | WR) == []
    assert len(graph.components()) == 1
    assert graph.cycle(0, RW, WR, {0, 1}, 9)[0] is None
    cycle, _ = graph.cycle(1, RW, WR, {0, 1}, 9)
    assert cycle is not None
    assert cycle.kinds == [RW, WR]
