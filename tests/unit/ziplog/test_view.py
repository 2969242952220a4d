"""Leases: the owner of each gsn, over epochs and runs of leases (docs/protocol.md, 2 and 3)."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ziplog.core.view import NO_DIGEST, Lease, LeaseRun, Member, run_of

members_of_leases = (
    st.dictionaries(st.integers(0, 20), st.integers(1, 6), min_size=1, max_size=5)
    .map(lambda weights: tuple(Member(s, 1, w) for s, w in sorted(weights.items())))
)  # fmt: skip


@st.composite
def leases(draw: st.DrawFn) -> Lease:
    return Lease(
        number=draw(st.integers(1, 1000)),
        predecessor=draw(st.binary(min_size=8, max_size=8)),
        base=draw(st.integers(1, 10**6)),
        first_epoch=draw(st.integers(0, 1000)),
        epochs=draw(st.integers(1, 4)),
        epoch_size=draw(st.integers(1, 40)),
        epoch_ms=10,
        members=draw(members_of_leases),
    )


def owners(lease: Lease) -> dict[int, int]:
    """Return each gsn's owner by the definition: each epoch repeats the round from its base."""
    return {
        lease.base + epoch * lease.epoch_size + offset: lease.schedule.owner(offset)
        for epoch in range(lease.epochs)
        for offset in range(lease.epoch_size)
    }


@given(leases())
def test_every_gsn_has_one_owner_and_one_epoch(lease: Lease) -> None:
    table = owners(lease)
    assert sorted(table) == list(range(lease.base, lease.stop))
    for gsn, shard in table.items():
        assert lease.owner(gsn) == shard
        epoch = lease.epoch_at(gsn)
        assert lease.epoch_base(epoch) <= gsn < lease.epoch_base(epoch + 1)
    assert lease.epoch_at(lease.stop - 1) == lease.stop_epoch - 1


@given(leases())
def test_next_owned_is_the_first_at_or_after_over_epoch_ends(lease: Lease) -> None:
    table = owners(lease)
    for shard in range(21):
        owned = [gsn for gsn, owner in table.items() if owner == shard]
        for gsn in range(max(lease.base - 3, 0), lease.stop + 3):
            expected = next((mine for mine in owned if mine >= gsn), lease.stop)
            assert lease.next_owned(shard, gsn) == expected


@given(leases(), st.integers(1, 12))
def test_take_returns_consecutive_slots_of_one_epoch_or_nothing(lease: Lease, count: int) -> None:
    table = owners(lease)
    for shard in (member.shard for member in lease.members):
        owned = [gsn for gsn, owner in table.items() if owner == shard]
        for index, gsn in enumerate(owned):
            run = [
                g for g in owned[index : index + count] if lease.epoch_at(g) == lease.epoch_at(gsn)
            ]
            assert lease.take(shard, gsn, count) == (run if len(run) == count else [])
            assert lease.slot(shard, gsn) == index
        assert lease.slot(shard, lease.stop) == len(owned)


@given(leases(), members_of_leases)
def test_leases_follow_each_other_without_a_gap(lease: Lease, members: tuple[Member, ...]) -> None:
    after = lease.following(members, epochs=3, epoch_size=7, epoch_ms=1000)
    assert (after.number, after.base) == (lease.number + 1, lease.stop)
    assert after.first_epoch == lease.epoch_at(lease.stop - 1) + 1
    assert after.predecessor == lease.digest
    assert (after.epochs, after.epoch_size, after.epoch_ms, after.members) == (3, 7, 1000, members)
    assert lease.repeats(lease.following())
    assert not lease.repeats(lease)


@given(leases(), st.integers(2, 6))
def test_run_returns_each_of_its_leases(lease: Lease, count: int) -> None:
    chain = [lease]
    for _ in range(count - 1):
        chain.append(chain[-1].following())
    run = LeaseRun(chain[0], count, chain[-1])
    for one in chain:
        for gsn in (one.base, one.stop - 1):
            found = run.lease_at(gsn)
            assert msgspec.structs.replace(found, predecessor=one.predecessor) == one
    for index in range(count - 1):
        part = run.after(chain[index].number, chain[index].digest)
        assert part == LeaseRun(chain[index + 1], count - index - 1, chain[-1])


@given(leases(), st.integers(1, 4))
def test_a_run_knows_the_owners_and_the_epochs_of_its_leases(lease: Lease, count: int) -> None:
    chain = [lease]
    for _ in range(count - 1):
        chain.append(chain[-1].following())
    run = LeaseRun(lease, count, chain[-1])
    for one in chain:
        for epoch in (one.first_epoch, one.stop_epoch - 1):
            assert run.lease_of_epoch(epoch).number == one.number
    table = {gsn: owner for one in chain for gsn, owner in owners(one).items()}
    for shard in range(21):
        owned = [gsn for gsn, owner in table.items() if owner == shard]
        for gsn in range(max(lease.base - 3, 0), run.last.stop + 3):
            first = next((mine for mine in owned if mine >= gsn), max(gsn, run.last.stop))
            assert run.next_owned(shard, gsn) == first


def test_the_digest_covers_every_field() -> None:
    lease = Lease(1, NO_DIGEST, 1, 0, 16, 2**24, 10, (Member(0, 1, 1), Member(1, 1, 1)))
    changed = [
        msgspec.structs.replace(lease, **{name: value})
        for name, value in {
            "number": 2,
            "predecessor": b"12345678",
            "base": 2,
            "first_epoch": 1,
            "epochs": 15,
            "epoch_size": 2**23,
            "epoch_ms": 11,
            "members": (Member(0, 2, 1), Member(1, 1, 1)),
        }.items()
    ]
    assert len({one.digest for one in [lease, *changed]}) == len(changed) + 1


def test_the_digest_is_the_same_in_every_process_and_version() -> None:
    lease = Lease(1, NO_DIGEST, 1, 0, 16, 2**24, 10, (Member(0, 1, 3), Member(1, 2, 2)))
    assert lease.digest.hex() == "699dcddd8b28a10e"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(lease), type=Lease).digest == lease.digest


def test_members_know_their_view() -> None:
    lease = Lease(1, NO_DIGEST, 1, 0, 1, 8, 10, (Member(0, 1, 3), Member(4, 2, 2)))
    assert (lease.view_of(0), lease.view_of(4), lease.view_of(3)) == (1, 2, None)


def test_a_run_of_one_lease_is_its_first_and_last() -> None:
    lease = Lease(1, NO_DIGEST, 1, 0, 1, 8, 10, (Member(0, 1, 3),))
    assert run_of(lease) == LeaseRun(lease, 1, lease)


def test_lease_without_members_belongs_to_no_shard() -> None:
    """Only a rebuilt history has such leases (docs/protocol.md, section 16)."""
    lease = Lease(1, NO_DIGEST, 1, 0, 16, 100, 10, ())
    assert (lease.owner(5), lease.weight_of(0), lease.view_of(0)) == (0, 0, None)
    assert lease.next_owned(0, 5) == lease.stop
    assert lease.schedule.stride(0) == (0, 0)
    assert lease.following().base == lease.stop
