from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mms.state import ClusterState
from shard.state.epoch_clock import EpochClock, LeaseConflictError
from tests.properties import examples
from tests.world import MS, S, first_lease
from ziplog.core.view import KEPT_RUNS, NO_DIGEST, Lease, LeaseRun, Member, run_of

if TYPE_CHECKING:
    import random


def run_from(first: Lease, count: int) -> LeaseRun:
    last = first
    for _ in range(count - 1):
        last = last.following()
    return LeaseRun(first, count, last)


def small_lease(weights: dict[int, int], *, epochs: int = 3, epoch_size: int = 7) -> Lease:
    members = tuple(Member(shard, 1, weight) for shard, weight in sorted(weights.items()))
    return Lease(1, bytes(8), 1, 0, epochs, epoch_size, 10, members)


# --- the chain ---


def test_one_lease_has_one_descriptor() -> None:
    first = first_lease(2)
    clock = EpochClock(0)
    clock.announce([run_of(first)], S, S)
    assert not clock.announce([run_of(first)], 5 * S, S)
    with pytest.raises(LeaseConflictError):
        clock.announce([run_of(replace(first, epoch_ms=11))], S, S)


def test_old_lease_announced_differently_is_detected() -> None:
    first = first_lease(1)
    second = first.following(epoch_ms=20)
    clock = EpochClock(0)
    clock.announce([run_of(first), run_of(second)], S, S)
    with pytest.raises(LeaseConflictError):
        clock.announce([run_of(replace(first, epochs=17))], S, S)


@pytest.mark.parametrize("change", [{"predecessor": b"12345678"}, {"base": 99}])
def test_successor_must_follow(change: dict[str, object]) -> None:
    first = first_lease(1)
    clock = EpochClock(0)
    clock.announce([run_of(first)], S, S)
    with pytest.raises(LeaseConflictError):
        clock.announce([run_of(replace(first.following(), **change))], S, S)


def test_old_leases_may_be_missing() -> None:
    """A server that was away for long does not receive trimmed leases."""
    first = first_lease(1)
    run = run_from(first, 6)
    received = LeaseRun(run.last, 1, run.last)
    clock = EpochClock(0)
    clock.announce([run_of(first)], S, S)
    assert not clock.announce([received], 2 * S, 2 * S, skip_to=run.last.base - 1)
    assert clock.last == first
    assert clock.announce([received], 2 * S, 2 * S, skip_to=run.last.base)
    assert (clock.last, clock.lease) == (run.last, run.last)
    assert clock.next_owned(run.last.base) == run.last.base
    assert clock.announce([run_of(run.last.following())], 3 * S, 2 * S)
    with pytest.raises(LeaseConflictError):
        clock.announce([run_of(replace(run.last, epoch_ms=11))], 3 * S, 3 * S, skip_to=2**62)


def test_lease_in_force_is_one_of_those_held() -> None:
    """If it is left out, the positions after it are not known, so the next lease begins at once."""
    run = run_from(first_lease(1), 6)
    clock = EpochClock(0)
    clock.announce([run_of(run.first)], S, S)
    assert clock.announce([run_of(run.last)], 9 * S, 2 * S, skip_to=run.last.base)
    assert clock.lease == run.last
    changed = EpochClock(0)
    changed.announce([run_of(run.first)], S, S)
    runs, lease = [], run.first
    for number in range(KEPT_RUNS):
        lease = lease.following(epoch_ms=20 + number)
        runs.append(run_of(lease))
    assert changed.announce(runs, 9 * S, 2 * S)
    assert changed.lease == lease


def test_gap_is_left_and_filled_by_a_run() -> None:
    first = first_lease(1)
    run = run_from(first, 6)
    clock = EpochClock(0)
    clock.announce([run_of(first)], S, S)
    assert not clock.announce([run_of(run.last)], S, S)
    assert clock.limit == first.stop
    assert clock.announce([run], S, S)  # it overlaps with the leases held
    assert clock.last == run.last
    assert list(clock.recent) == [run]


def test_forged_run_is_detected() -> None:
    first = first_lease(1)
    clock = EpochClock(0)
    clock.announce([run_of(first)], S, S)
    forged = replace(run_from(first, 4).last, epoch_ms=99)
    with pytest.raises(LeaseConflictError):
        clock.announce([LeaseRun(first, 4, forged)], S, S)


def test_idle_leases_are_one_run_and_all_are_known() -> None:
    lease = first_lease(2)
    clock = EpochClock(0)
    clock.announce([run_of(lease)], S, S)
    for _ in range(500):
        lease = lease.following()
        assert clock.announce([run_of(lease)], S, S)
    assert len(clock.recent) == 1
    assert clock.next_owned(2) == 3
    middle = first_lease(2).stop * 200
    assert clock.lease_of(middle) is not None
    assert clock.owns(3) is True
    assert clock.owns(clock.limit) is None


def test_reader_gets_the_leases_after_its_own() -> None:
    first = first_lease(1)
    runs = [run_from(first, 3)]
    runs.append(run_from(runs[0].last.following(epoch_ms=50), 2))
    clock = EpochClock(0)
    clock.announce(runs, S, S)
    assert clock.runs_after(0, b"") == runs
    assert clock.runs_after(5, runs[1].last.digest) == []
    second = first.following()
    rest = clock.runs_after(2, second.digest)
    assert [run.first.number for run in rest] == [3, 4]
    assert rest[0].first.predecessor == second.digest
    assert rest[1:] == runs[1:]


# --- time ---


def test_epochs_pass_by_the_clock_and_the_last_one_stays() -> None:
    lease = first_lease(1, epochs=4)
    clock = EpochClock(0)
    clock.announce([run_of(lease)], S, S)
    bases = [clock.current_epoch_base(S + at * MS) for at in (0, 9, 10, 35, 40, 4000)]
    assert bases == [lease.epoch_base(epoch) for epoch in (0, 0, 1, 3, 3, 3)]
    assert clock.next_epoch_at(S + 9 * MS) == S + 10 * MS
    assert clock.next_epoch_at(S + 35 * MS) is None


def test_next_lease_begins_at_the_announced_time() -> None:
    first = first_lease(1, epochs=4)
    clock = EpochClock(0)
    clock.announce([run_of(first)], S, S)
    second = first.following()
    clock.announce([run_of(second)], S + 40 * MS, S + 15 * MS)
    assert clock.current_epoch_base(S + 39 * MS) == first.epoch_base(3)
    assert clock.next_epoch_at(S + 35 * MS) == S + 40 * MS
    assert clock.current_epoch_base(S + 40 * MS) == second.base
    assert clock.current_epoch_base(S + 51 * MS) == second.epoch_base(5)


def test_early_end_is_a_lease_that_begins_at_once() -> None:
    first = first_lease(1, epochs=4)
    second, third = first.following(), first.following().following()
    clock = EpochClock(0)
    clock.announce([run_of(first)], S, S)
    clock.announce([run_of(second)], S + 40 * MS, S + 5 * MS)
    clock.announce([run_of(third)], S + 6 * MS, S + 6 * MS)
    assert clock.current_epoch_base(S + 6 * MS) == third.base
    assert clock.current_epoch_base(S + 41 * MS) == third.epoch_base(third.first_epoch + 3)
    # A late repetition changes nothing.
    clock.announce([run_of(second)], S + 60 * MS, S + 50 * MS)
    assert clock.current_epoch_base(S + 61 * MS) == third.epoch_base(third.first_epoch + 3)


def test_first_lease_is_in_force_at_once() -> None:
    clock = EpochClock(0)
    assert clock.current_epoch_base(S) == 0
    assert clock.next_epoch_at(S) is None
    clock.announce([run_of(first_lease(1))], 2 * S, S)
    assert clock.current_epoch_base(S) == 1


#: The end of `first_lease(1)`, of 160 ms, if it begins at one second, and the longest shift.
END, SHIFT = S + 160 * MS, 160 * MS // 128


@pytest.mark.parametrize(
    ("announced", "begins"),
    [
        (END, END),
        (END + MS, END + MS),
        (END - MS, END - MS),
        (END + 70 * MS, END + SHIFT),
        (END - 70 * MS, END - SHIFT),
        (END + 81 * MS, END + 81 * MS),
        (END - 81 * MS, END - 81 * MS),
    ],
)
def test_late_announcement_hardly_shifts_a_lease(announced: int, begins: int) -> None:
    first = first_lease(1)
    clock = EpochClock(0)
    clock.announce([run_of(first)], S, S)
    assert clock.begin_of([run_of(first.following())], announced) == begins


def test_clock_nears_the_announced_times_step_by_step() -> None:
    lease, at = first_lease(1), S + 20 * MS  # its announcement was 20 ms later than all others
    clock = EpochClock(0)
    clock.announce([run_of(lease)], at, at)
    late = []
    for number in range(1, 20):
        lease = lease.following()
        announced = S + number * 160 * MS
        begins = clock.begin_of([run_of(lease)], announced)
        clock.announce([run_of(lease)], begins, announced - 80 * MS)
        late.append(begins - announced)
    assert late == [max(20 * MS - number * SHIFT, 0) for number in range(1, 20)]


def test_clock_follows_the_announcement_after_a_gap_and_after_a_restart() -> None:
    first = first_lease(1)
    clock, restarted = EpochClock(0), EpochClock(0)
    restarted.restore([run_of(first)], S)
    second = first.following()
    assert clock.begin_of([run_of(first)], END) == END
    clock.announce([run_of(first)], S, S)
    assert clock.begin_of([run_from(second, 2)], END + 50 * MS) == END + 50 * MS
    assert clock.begin_of([], END + 50 * MS) == END + 50 * MS
    assert restarted.begin_of([run_of(second)], S + 50 * MS) == S + 50 * MS
    restarted.announce([run_of(second)], S + 50 * MS, S)
    third = run_of(second.following())
    assert restarted.begin_of([third], S + 230 * MS) == S + 210 * MS + SHIFT


def test_restart_is_in_the_last_epoch() -> None:
    run = run_from(first_lease(1, epochs=4), 3)
    clock = EpochClock(0)
    clock.restore([run], S)
    assert clock.current_epoch_base(S) == run.last.epoch_base(run.last.first_epoch + 3)
    assert clock.limit == run.last.stop
    assert clock.lease_of(1) == run.first


# --- positions ---

weights = st.dictionaries(st.integers(0, 3), st.integers(1, 4), min_size=1, max_size=4)


@st.composite
def clocks(draw: st.DrawFn) -> tuple[EpochClock, list[Lease]]:
    """Return a clock that holds several runs, and every single lease of them."""
    leases: list[Lease] = []
    runs: list[LeaseRun] = []
    for _ in range(draw(st.integers(1, 3))):
        sizes = draw(st.integers(1, 3)), draw(st.integers(1, 12))
        shape = small_lease(draw(weights), epochs=sizes[0], epoch_size=sizes[1])
        first = shape
        if leases:
            first = leases[-1].following(shape.members, epochs=sizes[0], epoch_size=sizes[1])
        run = run_from(first, draw(st.integers(1, 4)))
        lease = first
        for _ in range(run.count):
            leases.append(lease)
            lease = lease.following()
        runs.append(run)
    clock = EpochClock(draw(st.integers(0, 3)))
    for announced in draw(st.sampled_from([[runs], [[run] for run in runs]])):
        clock.announce(announced, S, S)
    clock.current_epoch_base(S + draw(st.integers(0, 50)) * MS)
    return clock, leases


def owned(leases: list[Lease], shard: int) -> list[tuple[int, int]]:
    """Return (gsn, epoch) of every position of a shard."""
    return [
        (gsn, lease.epoch_at(gsn))
        for lease in leases
        for gsn in range(lease.base, lease.stop)
        if lease.owner(gsn) == shard
    ]


@examples(150, derandomize=True)
@given(clocks(), st.integers(1, 200))
def test_next_owned_equals_brute_force(held: tuple[EpochClock, list[Lease]], gsn: int) -> None:
    clock, leases = held
    gsn = min(gsn, clock.limit)
    later = [at for at, _ in owned(leases, clock.shard) if at >= gsn]
    assert clock.next_owned(gsn) == (later[0] if later else clock.limit)


@examples(150, derandomize=True)
@given(clocks(), st.integers(1, 150), st.integers(1, 5))
def test_first_slots_equals_brute_force(
    held: tuple[EpochClock, list[Lease]], floor: int, count: int
) -> None:
    clock, leases = held
    mine = [row for row in owned(leases, clock.shard) if row[0] >= floor]
    pieces = (mine[at : at + count] for at in range(len(mine)))
    fitting = (p for p in pieces if len(p) == count and p[0][1] == p[-1][1])
    expected = next(fitting, [])
    assert clock.first_slots(floor, count) == [gsn for gsn, _ in expected]
    if expected:
        assert clock.epoch_at(expected[0][0]) == expected[0][1]
        between = clock.slots_between(expected[0][0], expected[-1][0])
        assert between == count - 1
        assert clock.slots_between(expected[-1][0], expected[0][0]) == 1 - count


def test_unit_larger_than_every_epoch_is_detected_quickly() -> None:
    run = run_from(small_lease({0: 1, 1: 1}), 10_000)
    clock = EpochClock(0)
    clock.announce([run], S, S)
    assert clock.epoch_slots == 4
    assert clock.first_slots(1, 5) == []
    assert EpochClock(7).epoch_slots == 0


def test_shard_without_weight_has_no_positions() -> None:
    clock = EpochClock(5)
    clock.announce([run_from(small_lease({0: 1}), 10_000)], S, S)
    assert clock.first_slots(1, 1) == []
    assert clock.next_owned(3) == clock.limit
    assert clock.epoch_slots == 0


def test_offsets_between_epochs_are_unknown() -> None:
    lease = small_lease({0: 1, 1: 1})
    clock = EpochClock(0)
    clock.announce([run_of(lease)], S, S)
    assert clock.slots_between(1, 5) == 2
    assert clock.slots_between(1, 8) is None
    assert clock.slots_between(1, lease.stop) is None
    assert clock.slots_between(lease.stop, 1) is None


# --- a shard that is in some leases only ---


def with_and_without() -> list[Lease]:
    """Return leases with shard 0, without it, and with it again."""
    first = first_lease(2)
    second = first.following((Member(1, 1, 1),))
    return [first, second, second.following(first.members)]


def test_shard_has_no_positions_when_a_lease_begins_after_its_last_one() -> None:
    first, second, third = with_and_without()
    clock = EpochClock(0)
    assert clock.positions_end_at is None
    clock.announce([run_of(first)], S, S)
    assert clock.positions_end_at is None
    clock.announce([run_of(second)], 2 * S, S)
    assert clock.positions_end_at == 2 * S
    clock.announce([run_of(third)], 3 * S, S)
    assert clock.positions_end_at is None
    clock.announce([run_of(third.following(second.members))], 4 * S, S)
    assert clock.positions_end_at == 4 * S
    clock.advance(5 * S)
    assert clock.positions_end_at == 4 * S
    assert EpochClock(1).positions_end_at is None


def test_lease_that_is_skipped_counts_until_a_later_one_begins() -> None:
    first, second, third = with_and_without()
    last = third.following(second.members)
    clock = EpochClock(0)
    clock.announce([run_of(first), run_of(second)], S, S)
    assert clock.positions_end_at == S
    clock.announce([run_of(third), run_of(last)], 9 * S, 2 * S)
    assert clock.positions_end_at == 9 * S
    assert not clock.has_ended(second.stop)
    assert clock.has_ended(third.stop)


def test_past_exclusion_of_the_shard_is_remembered() -> None:
    first, second, third = with_and_without()
    clock = EpochClock(0)
    clock.announce([run_of(first), run_of(first.following())], S, S)
    assert not clock.was_excluded
    clock.announce([run_of(first.following().following(second.members))], S, S)
    assert clock.was_excluded
    away = EpochClock(0)
    away.announce([run_of(first)], S, S)
    away.announce([run_of(third)], S, S, skip_to=third.base)
    assert away.was_excluded, "the trimmed leases are not known"


# --- more leases than are kept ---


def changing(first: Lease, count: int, members: tuple[Member, ...] | None = None) -> list[LeaseRun]:
    """Return runs of one lease each, following `first`."""
    runs, last = [], first
    for _ in range(count):
        last = last.following(members, epoch_ms=11 if last.epoch_ms == 10 else 10)
        runs.append(run_of(last))
    return runs


def test_end_of_a_shard_is_kept_when_its_leases_are_dropped() -> None:
    two = small_lease({0: 1, 1: 1})
    runs = changing(two, KEPT_RUNS + 9, two.members[:1])
    clock = EpochClock(1)
    clock.announce([run_of(two)], S, S)
    assert not clock.has_ended(two.base)
    for run in runs:
        clock.announce([run], S, S)
        assert clock.has_ended(two.stop)
        assert not clock.has_ended(two.base)
    clock.announce([run_of(clock.last.following(two.members))], S, S)
    assert not clock.has_ended(two.stop)


def test_server_that_missed_its_shards_end_receives_it() -> None:
    two = small_lease({0: 1, 1: 1})
    clock = EpochClock(1)
    clock.announce(changing(two, KEPT_RUNS + 9, two.members[:1])[9:], S, S)
    assert not clock.has_ended(two.stop), "it may have had a lease in between"
    clock.left_at = two.stop
    assert clock.has_ended(two.stop)
    assert not clock.has_ended(two.stop - 1)


def test_leases_that_are_more_than_a_server_keeps_are_skipped() -> None:
    two = small_lease({0: 1, 1: 1})
    runs = changing(two, 3 * KEPT_RUNS)
    clock = EpochClock(1)
    clock.announce([run_of(two)], S, S)
    newest = runs[-KEPT_RUNS:]
    assert not clock.announce(newest, 2 * S, 2 * S), "a gap that is not announced as trimmed"
    assert clock.announce(newest, 2 * S, 2 * S, skip_to=newest[0].first.base)
    assert (clock.last, len(clock.recent)) == (runs[-1].last, KEPT_RUNS)
    assert clock.was_excluded, "the skipped leases are not known"


@examples(60)
@given(st.randoms(use_true_random=False))
def test_announcements_may_be_lost_late_and_repeated(noise: random.Random) -> None:
    state = ClusterState()
    state.runs = [run_of(small_lease({0: 1, 1: 1}))]
    clock = EpochClock(1)
    sent: list[tuple[list[LeaseRun], int]] = []
    for _ in range(60):
        state.runs += changing(state.runs[-1].last, noise.choice((1, 3, 70, 150)))
        held = noise.choice((0, clock.last.number if clock.last else 0))
        first = state.first_needed(held, noise.choice((1, state.runs[-1].last.base)))
        number = first.first.number - 1 if first is not None else held
        digest = first.first.predecessor if first is not None else clock_digest(clock, held)
        runs = state.runs_after(number, digest)
        sent.append((runs, runs[0].first.base if first is not None else 0))
        for runs, skip_to in noise.choices(sent, k=noise.randrange(3)):
            before = clock.last
            clock.announce(runs, S, S, skip_to)
            assert before is None or clock.last.number >= before.number
        if noise.random() < 0.2:
            clock = EpochClock(1)  # another process
    runs, skip_to = sent[-1]
    clock.announce(runs, S, S, skip_to)
    first = state.first_needed(clock.last.number if clock.last else 0, 1)
    if first is not None:
        clock.announce(
            state.runs_after(first.first.number - 1, first.first.predecessor), S, S,
            first.first.base,
        )  # fmt: skip
    else:
        clock.announce(state.runs_after(clock.last.number, clock.last.digest), S, S)
    assert clock.last == state.last
    kept = list(clock.recent)
    assert kept[1:] == state.runs[-len(kept) :][1:]


def clock_digest(clock: EpochClock, held: int) -> bytes:
    return clock.last.digest if held and clock.last is not None else NO_DIGEST
