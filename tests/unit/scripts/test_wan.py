"""The queue of a network of regions: when packets are due, and which are lost."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wan import delay_queue, namespaces
from wan.delay_queue import DelayQueue, Path

if TYPE_CHECKING:
    from pathlib import Path as FilePath

MS = 1_000_000


def queue(path: Path, *, seed: int = 0) -> DelayQueue:
    made = DelayQueue(2, Random(seed))
    made.set_path(0, 1, path)
    return made


def test_a_packet_is_due_after_its_delay() -> None:
    made = queue(Path(delay_ns=20 * MS))
    made.push(5 * MS, 0, 1, b"one")
    assert made.next_due() == 25 * MS
    assert made.pop_due(25 * MS - 1) == []
    assert made.pop_due(25 * MS) == [(1, b"one")]
    assert made.next_due() is None


def test_each_direction_is_a_path_of_its_own() -> None:
    made = queue(Path(delay_ns=20 * MS))
    made.push(0, 0, 1, b"there")
    made.push(0, 1, 0, b"back")
    assert made.pop_due(0) == [(0, b"back")]


def test_a_path_that_is_cut_loses_packets_one_way_only() -> None:
    made = queue(Path(is_cut=True))
    made.push(0, 0, 1, b"there")
    made.push(0, 1, 0, b"back")
    assert made.pop_due(0) == [(0, b"back")]
    assert made.counters(0, 1).lost == 1
    assert made.counters(1, 0).lost == 0


def test_a_cut_spares_packets_under_way() -> None:
    made = queue(Path(delay_ns=MS))
    made.push(0, 0, 1, b"one")
    made.set_path(0, 1, Path(delay_ns=MS, is_cut=True))
    assert made.pop_due(MS) == [(1, b"one")]


def test_a_rate_makes_packets_wait_for_each_other() -> None:
    made = queue(Path(delay_ns=MS, bytes_per_s=1_000_000))
    for _ in range(2):
        made.push(0, 0, 1, bytes(1000))
    assert made.next_due() == 2 * MS
    assert len(made.pop_due(3 * MS - 1)) == 1
    assert len(made.pop_due(3 * MS)) == 1


def test_a_full_path_drops_packets_and_takes_more_once_it_has_delivered() -> None:
    made = queue(Path(delay_ns=MS))
    size = delay_queue.MAX_PATH_BYTES // 2
    for _ in range(3):
        made.push(0, 0, 1, bytes(size))
    assert made.counters(0, 1).lost == 1
    made.pop_due(MS)
    made.push(MS, 0, 1, bytes(size))
    assert made.counters(0, 1).packets == 3
    assert made.counters(0, 1).bytes == 3 * size


def test_loss_takes_about_its_share() -> None:
    made = queue(Path(loss=0.25), seed=3)
    for _ in range(4000):
        made.push(0, 0, 1, b"x")
    assert 900 < made.counters(0, 1).lost < 1100


def test_a_shorter_delay_overtakes_no_packet_under_way() -> None:
    made = queue(Path(delay_ns=50 * MS))
    made.push(0, 0, 1, b"first")
    made.set_path(0, 1, Path(delay_ns=MS))
    made.push(MS, 0, 1, b"second")
    assert made.pop_due(49 * MS) == []
    assert made.pop_due(50 * MS) == [(1, b"first"), (1, b"second")]


@given(
    st.lists(st.integers(0, 5 * MS), max_size=30),
    st.integers(0, 30 * MS),
    st.integers(0, 30 * MS),
    st.integers(0, 1000),
)
def test_a_path_delivers_in_order_and_never_early(
    pauses: list[int], delay: int, jitter: int, seed: int
) -> None:
    made = queue(Path(delay_ns=delay, jitter_ns=jitter), seed=seed)
    now, sent = 0, []
    for number, pause in enumerate(pauses):
        now += pause
        sent.append(now)
        made.push(now, 0, 1, number.to_bytes(1))
    arrived = []
    while (due := made.next_due()) is not None:
        for _, packet in made.pop_due(due):
            assert due >= sent[packet[0]] + delay
            # A packet waits for those before it: at most for what the latest of them drew.
            assert due <= sent[packet[0]] + delay + jitter
            arrived.append(packet[0])
    assert arrived == list(range(len(pauses)))


def test_an_address_names_its_region() -> None:
    assert [namespaces.region_of(namespaces.address(region)) for region in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("may_enter", [True, False])
def test_a_process_without_the_right_enters_the_user_namespace_first(
    monkeypatch: pytest.MonkeyPatch, *, may_enter: bool
) -> None:
    entered: list[str] = []

    def enter(path: FilePath, _: int) -> None:
        if not (may_enter or entered or path.name == "user"):
            raise PermissionError
        entered.append(path.name)

    monkeypatch.setattr(namespaces, "_set_namespace", enter)
    namespaces.enter(4242, 1)
    assert entered == (["201"] if may_enter else ["user", "201"])
