"""Shares: quotas, and several processes that list the cursors at different times."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from logplayer.shares import quotas, share
from tests.properties import examples


@examples(200)
@given(
    st.dictionaries(st.text(max_size=3), st.integers(0, 9), min_size=1, max_size=8),
    st.integers(0, 40),
)
def test_quotas_sum_up_and_differ_by_one(owned: dict[str, int], tasks: int) -> None:
    found = quotas(owned, tasks)
    assert found.keys() == owned.keys()
    assert sum(found.values()) == tasks
    assert max(found.values()) - min(found.values()) <= 1
    by_size = sorted(owned, key=lambda name: owned[name])
    for fewer, more in itertools.pairwise(by_size):
        assert owned[fewer] == owned[more] or found[fewer] <= found[more]


def test_what_is_left_over_stays_with_a_process_that_owns_more() -> None:
    assert quotas({"a": 1, "b": 2}, 3) == {"a": 1, "b": 2}
    assert quotas({"a": 2, "b": 1}, 3) == {"a": 2, "b": 1}
    assert quotas({"b": 1, "a": 1}, 3) == {"a": 2, "b": 1}


def test_a_process_claims_what_is_free_and_what_the_dead_own() -> None:
    owners = {"t0": "", "t1": "b", "t2": "dead", "t3": "a"}
    found = share("a", 0, ["a", "b"], owners, ["t3"])
    assert (found.claim, found.missing, found.drain) == (["t0", "t2"], 1, [])


def test_processes_begin_to_claim_at_different_tasks() -> None:
    owners = {f"t{n}": "" for n in range(6)}
    starts = [share(name, slot, "abc", owners, []).claim[0] for slot, name in enumerate("abc")]
    assert starts == ["t0", "t2", "t4"]


def test_a_process_gives_up_only_its_surplus() -> None:
    owners = {f"t{n}": "a" for n in range(5)}
    found = share("a", 0, ["a", "b"], owners, list(owners))
    assert (found.claim, found.missing, found.drain) == ([], 0, ["t4", "t3"])


def test_a_process_takes_nothing_from_a_living_owner() -> None:
    owners = {f"t{n}": "a" for n in range(5)}
    assert share("b", 1, ["a", "b"], owners, []).claim == []


class Simulation:
    """Processes that list, claim and drain in any order, each by a list of its own age."""

    def __init__(self, seed: int, tasks: int, members: int) -> None:
        self.random = random.Random(seed)
        self.owners = {f"t{n}": "" for n in range(tasks)}
        self.slots = {f"m{n}": n for n in range(members)}
        self.seen: dict[str, dict[str, str]] = {name: dict(self.owners) for name in self.slots}
        self.members = {name: list(self.slots) for name in self.slots}
        self.moves = 0

    def turn(self) -> None:
        name = self.random.choice(list(self.slots))
        if self.random.random() < 0.4:
            self.seen[name] = dict(self.owners)
            self.members[name] = list(self.slots)
            return
        held = [task for task, owner in self.owners.items() if owner == name]
        known = self.members[name]
        found = share(name, self.slots[name], known, self.seen[name], held)
        self.seen[name] = dict(self.owners)
        self.members[name] = list(self.slots)
        for task in found.drain:
            assert self.owners[task] == name
            self.owners[task] = ""
        missing = found.missing
        for task in found.claim:
            if missing and self.owners[task] not in self.slots:
                self.owners[task] = name
                self.moves += 1
                missing -= 1

    def counts(self) -> list[int]:
        owners = list(self.owners.values())
        return sorted(owners.count(name) for name in self.slots)

    def is_balanced(self) -> bool:
        each, more = divmod(len(self.owners), len(self.slots))
        spare = len(self.slots) - more
        return self.counts() == [each] * spare + [each + 1] * more


@examples(60)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 5))
def test_processes_reach_their_quotas_and_stay_there(seed: int, tasks: int, members: int) -> None:
    world = Simulation(seed, tasks, members)
    for _ in range(600):
        world.turn()
    assert world.is_balanced()
    world.moves = 0
    for _ in range(200):
        world.turn()
    assert not world.moves, "tasks move between processes that are at their quotas"


@examples(60)
@given(st.integers(0, 10**6), st.integers(1, 20))
def test_a_further_process_moves_no_more_than_its_quota(seed: int, tasks: int) -> None:
    world = Simulation(seed, tasks, 2)
    for _ in range(600):
        world.turn()
    world.slots["m9"] = 2
    world.seen["m9"], world.members["m9"] = dict(world.owners), list(world.slots)
    world.moves = 0
    for _ in range(900):
        world.turn()
    assert world.is_balanced()
    assert world.moves <= -(-tasks // 3) + 1


@examples(60)
@given(st.integers(0, 10**6), st.integers(1, 20))
def test_the_tasks_of_a_process_that_died_are_shared(seed: int, tasks: int) -> None:
    world = Simulation(seed, tasks, 3)
    for _ in range(600):
        world.turn()
    del world.slots["m1"]
    for _ in range(600):
        world.turn()
    assert world.is_balanced()
