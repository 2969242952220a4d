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
