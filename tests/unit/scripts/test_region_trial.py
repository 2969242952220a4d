"""Faults of regions: their order, and the verdict on what clients saw."""

from __future__ import annotations

from itertools import islice
from typing import Final

import pytest
from region_trial import verdict
from region_trial.clients import CLIENTS, READERS, WRITERS, first_number, region_of
from region_trial.schedule import KINDS, RegionFault, faults
from region_trial.verdict import Injected, Limits, Seen

S: Final = 1_000_000_000
REGIONS: Final = ("A", "B", "C")
LIMITS: Final = Limits(suspicion_s=1.0, round_trip_s=0.1)


def injected(kind: str, *, whole: int | None = 42 * S) -> Injected:
    return Injected(RegionFault(kind, "A", "B", 30.0), 10 * S, 40 * S, whole, 0.5)


def steady() -> dict[str, Seen]:
    """Return regions that see something every second."""
    times = [second * S for second in range(60)]
    return {region: Seen([(t, t + 1) for t in times], [*times], [*times]) for region in REGIONS}


# --- the schedule ---


@pytest.mark.parametrize("seed", range(5))
def test_each_kind_hits_each_region_once_in_as_many_rounds_as_regions(seed: int) -> None:
    found = list(islice(faults(REGIONS, list(KINDS), seed), len(KINDS) * len(REGIONS)))
    assert {(one.kind, one.region) for one in found} == {(k, r) for k in KINDS for r in REGIONS}
    assert [one.kind for one in found[: len(KINDS)]] == list(KINDS)


def test_a_part_is_from_the_next_region_and_durations_are_scaled() -> None:
    for one in islice(faults(REGIONS, ["part"], 0, 0.5), 3):
        assert one.other == REGIONS[(REGIONS.index(one.region) + 1) % 3]
        assert one.seconds == KINDS["part"] / 2


@pytest.mark.parametrize(
    ("kind", "writing", "reading"),
    [("kill", "BC", "BC"), ("cut", "BC", "BC"), ("slow", "ABC", "ABC"), ("part", "ABC", "C")],
)
def test_the_regions_that_must_continue(kind: str, writing: str, reading: str) -> None:
    fault = RegionFault(kind, "A", "B", 1.0)
    assert "".join(fault.writing(REGIONS)) == writing
    assert "".join(fault.reading(REGIONS)) == reading


def test_the_number_of_a_process_says_its_region() -> None:
    for kind in (CLIENTS, WRITERS, READERS):
        for region in range(3):
            assert region_of(first_number(kind, region)) == region
            assert region_of(first_number(kind, region) + 50) == region


# --- the verdict ---


def test_a_pause_is_the_longest_time_within_a_fault() -> None:
    assert verdict.pause_s([], 0, 5 * S) == 5
    assert verdict.pause_s([S, 4 * S, 90 * S], 0, 5 * S) == 3
    assert verdict.pause_s([2 * S], S, 10 * S) == 8


def test_a_steady_run_is_as_promised() -> None:
    assert list(verdict.broken_promises(injected("kill"), steady())) == []
    assert list(verdict.too_slow(injected("kill"), steady(), LIMITS)) == []


def test_an_acknowledgement_in_a_region_that_is_cut_off_breaks_a_promise() -> None:
    one = injected("cut")
    assert verdict.acked_while_cut(one, steady()) == 29
    assert len(list(verdict.broken_promises(one, steady()))) == 1
    seen = steady()
    seen["A"].acks = [(9 * S, 11 * S), (12 * S, 41 * S)]  # under way at one of its ends
    assert list(verdict.broken_promises(one, seen)) == []


@pytest.mark.parametrize("attribute", ["writer", "reader"])
@pytest.mark.parametrize(
    ("kind", "region", "count"),
    [("kill", "B", 1), ("cut", "C", 1), ("cut", "A", 0), ("slow", "B", 0), ("part", "C", 1)],
)
def test_clients_that_must_continue_and_never_do_break_a_promise(
    attribute: str, kind: str, region: str, count: int
) -> None:
    seen = steady()
    seen["A"].acks.clear()
    setattr(seen[region], attribute, [t * S for t in range(60) if not 11 < t <= 40])
    one = injected(kind)
    found = list(verdict.broken_promises(one, seen))
    expected = f"{one.fault}: the {attribute} in {region} did not continue"
    assert found == [expected] * count


def test_a_cluster_that_is_never_whole_breaks_a_promise() -> None:
    (text,) = verdict.broken_promises(injected("slow", whole=None), steady())
    assert text == "slow A for 30 s: the cluster did not become whole"


@pytest.mark.parametrize(
    ("attribute", "region", "count"),
    [("writer", "B", 1), ("reader", "C", 1), ("writer", "A", 0), ("reader", "A", 0)],
)
def test_only_regions_outside_must_continue_in_time(
    attribute: str, region: str, count: int
) -> None:
    seen = steady()
    setattr(seen[region], attribute, [t * S for t in range(60) if not 10 < t < 14])
    found = list(verdict.too_slow(injected("kill"), seen, LIMITS))
    assert len(found) == count
    assert all(f"the {attribute} in {region} paused 4.00 s" in text for text in found)
    assert list(verdict.too_slow(injected("slow"), seen, LIMITS)) == []


def test_a_late_healing_is_too_slow() -> None:
    (text,) = verdict.too_slow(injected("kill", whole=46 * S), steady(), LIMITS)
    assert text.endswith("whole 6.00 s after the healing, of 5.00")


def test_a_shard_that_was_slow_may_stay_parked_for_a_while() -> None:
    assert list(verdict.too_slow(injected("slow", whole=54 * S), steady(), LIMITS)) == []
    (text,) = verdict.too_slow(injected("slow", whole=56 * S), steady(), LIMITS)
    assert text.endswith("whole 16.00 s after the healing, of 15.00")


def test_figures_and_windows_of_a_fault() -> None:
    one = injected("kill")
    row = verdict.row(one, steady())
    assert row["writers_s"] == {"A": 1.0, "B": 1.0, "C": 1.0}
    assert (row["whole_s"], row["load"]) == (2.0, 0.5)
    windows = verdict.windows(one, steady())
    assert len(windows["B"]["acks"]) == (2 + 30 + 5) * 10
    assert windows["B"]["acks"][:11] == [1, *[0] * 9, 1]
