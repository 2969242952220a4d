"""The lease map of a reader, also with very many leases (docs/protocol.md, section 7)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from ziplog.client.common.lease_map import LeaseMap
from ziplog.core.view import NO_DIGEST, Lease, LeaseRun, Member, run_of


def history(choices: list[int]) -> list[LeaseRun]:
    """Return runs of one lease each; the bits of each number name its members."""
    runs: list[LeaseRun] = []
    for number, bits in enumerate(choices):
        members = tuple(Member(shard, 1, 1) for shard in range(4) if bits >> shard & 1)
        if runs:
            runs.append(run_of(runs[-1].last.following(members, epoch_ms=10 + number % 2)))
        else:
            runs.append(run_of(Lease(1, NO_DIGEST, 1, 0, 4, 4, 10, members)))
    return runs


def runs_of(leases: list[Lease]) -> list[LeaseRun]:
    """Return the runs of some leases; equal leases in a row are one run."""
    runs: list[LeaseRun] = []
    for lease in leases:
        if runs and runs[-1].last.repeats(lease):
            runs[-1] = LeaseRun(runs[-1].first, runs[-1].count + 1, lease)
        else:
            runs.append(run_of(lease))
    return runs


@examples(200)
@given(
    st.lists(st.sampled_from([1, 2]), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12)), min_size=1, max_size=6),
)
def test_overlapping_parts_of_the_history_join(
    choices: list[int], parts: list[tuple[int, int]]
) -> None:
    leases = [Lease(1, NO_DIGEST, 1, 0, 4, 4, 10, (Member(choices[0], 1, 1),))]
    for shard in choices[1:]:
        leases.append(leases[-1].following((Member(shard, 1, 1),)))
    known = LeaseMap()
    start, stop = 0, 0
    for begin, end in parts:
        part = leases[begin:end]
        if not part:
            continue
        is_next = begin <= stop or not stop
        assert known.extend(runs_of(part)) == is_next
        if is_next:
            start, stop = start if stop else begin, max(stop, part[-1].number)
        # The run that is the first and the last known one may have begun earlier.
        first = known.runs[0].first.number - 1
        assert first <= start
        assert known.runs == runs_of(leases[first:stop])


def test_a_run_that_began_earlier_replaces_the_end_of_it_that_is_known() -> None:
    leases = [Lease(1, NO_DIGEST, 1, 0, 4, 4, 10, (Member(0, 1, 1),))]
    for _ in range(5):
        leases.append(leases[-1].following())
    known = LeaseMap()
    known.extend(runs_of(leases[2:4]))
    known.extend(runs_of(leases))
    assert known.runs == runs_of(leases)


@examples(200)
@given(
    st.lists(st.integers(1, 15), min_size=1, max_size=12),
    st.lists(st.integers(0, 220), max_size=6),
)
def test_lease_map_knows_the_members_of_its_leases(choices: list[int], passed: list[int]) -> None:
    known, runs = LeaseMap(), history(choices)
    for part in (runs[:4], runs[2:], runs[:3]):
        known.extend(part)
        for gsn in sorted(passed):
            known.forget(gsn)
            members = {member.shard for run in known.runs for member in run.first.members}
            assert known.shards == members
            rest = [run for run in known.runs if run.last.stop > gsn]
            needed = {member.shard for run in rest for member in run.first.members}
            assert known.shards == (needed or members)
    assert known.runs[-1].last == runs[-1].last
