"""The replicated state, compared with a plain model, and given any bytes at all."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mms.commands import (
    Barrier,
    Command,
    CreateCluster,
    GrantLease,
    RecordLoss,
    RemoveShard,
    SetFinalized,
    SetTrim,
    decode_refusal,
)
from mms.state import ClusterState
from tests.properties import examples
from ziplog.core.view import NO_DIGEST, Lease, LeaseRun, Member, Placement, Replica

CLUSTER = 77
MEMBERS = (Member(0, 1, 1), Member(1, 1, 1))


def placement(shard: int, view: int = 1, state: str = "live") -> Placement:
    replicas = tuple(Replica(f"shard-{shard}-{i}", f"127.0.0.1:{i + 1}") for i in range(2))
    return Placement(shard, view, state, replicas)  # type: ignore[arg-type]


def apply(state: ClusterState, command: Command) -> str:
    refusal = decode_refusal(state.apply(command.encode()))
    state.check()
    return refusal


def created() -> ClusterState:
    state = ClusterState()
    assert apply(state, CreateCluster(CLUSTER, "c", [placement(0), placement(1)])) == ""
    return state


def first_lease(epochs: int = 16, epoch_size: int = 2**24, epoch_ms: int = 10) -> Lease:
    return Lease(1, NO_DIGEST, 1, 0, epochs, epoch_size, epoch_ms, MEMBERS)


def with_leases(count: int, **options: int) -> ClusterState:
    state, lease = created(), first_lease(**options)
    for _ in range(count):
        assert apply(state, GrantLease(lease, [])) == ""
        lease = lease.following()
    return state


def test_only_the_exact_successor_is_granted() -> None:
    state = with_leases(3)
    last = state.last
    assert last is not None
    good = last.following()
    for change in (
        {"number": good.number + 1},
        {"base": good.base + 1},
        {"first_epoch": good.first_epoch + 1},
        {"predecessor": b"\1" * 8},
        {"epochs": 2**16},  # larger than a lease may be
    ):
        wrong = msgspec.structs.replace(good, **change)
        assert apply(state, GrantLease(wrong, [])) == "not-successor"
    assert state.last == last
    assert apply(state, GrantLease(good, [])) == ""


def test_a_command_that_comes_twice_counts_once() -> None:
    state = with_leases(2)
    last = state.last
    assert last is not None
    before = state.snapshot()
    assert apply(state, GrantLease(last, [])) == ""
    assert apply(state, CreateCluster(CLUSTER, "c", [placement(0)])) == ""
    assert apply(state, Barrier(b"token")) == ""
    assert state.snapshot() == before


def test_a_second_cluster_is_refused() -> None:
    assert apply(created(), CreateCluster(CLUSTER + 1, "d", [placement(0)])) == "other-cluster"


def test_nothing_is_granted_before_the_cluster_exists() -> None:
    assert apply(ClusterState(), GrantLease(first_lease(), [])) == "no-cluster"
    assert apply(ClusterState(), SetTrim(1)) == "no-cluster"


@pytest.mark.parametrize(
    "members",
    [
        (),
        (Member(0, 2, 1),),  # not its view
        (Member(5, 1, 1),),  # not a shard
        (Member(1, 1, 1), Member(0, 1, 1)),  # not sorted
        (Member(0, 1, 1), Member(0, 1, 1)),
        (Member(0, 1, 65_536), Member(1, 1, 1)),
    ],
    ids=str,
)
def test_impossible_members_are_refused(members: tuple[Member, ...]) -> None:
    lease = msgspec.structs.replace(first_lease(), members=members)
    assert apply(created(), GrantLease(lease, [])) == "bad-members"


def test_a_lease_may_bring_the_views_of_its_members() -> None:
    state = with_leases(1)
    last = state.last
    assert last is not None
    lease = last.following((Member(0, 1, 1), Member(1, 2, 1)))
    assert apply(state, GrantLease(lease, [])) == "bad-members"
    assert apply(state, GrantLease(lease, [placement(1, view=2)])) == ""
    back = lease.following(MEMBERS)
    assert apply(state, GrantLease(back, [placement(1, view=1)])) == "bad-placements"


def recovered(state: ClusterState, recovery: int) -> str:
    """Return shard 0 to the leases in a view."""
    last = state.last
    assert last is not None
    members = (Member(0, recovery, 1), Member(1, 1, 1))
    return apply(state, GrantLease(last.following(members), [placement(0, view=recovery)]))


def test_a_removed_shard_is_no_member_until_its_newest_recovery_brings_it_back() -> None:
    state = with_leases(2)
    last = state.last
    assert last is not None
    assert apply(state, RemoveShard(0, 1, 2)) == ""
    assert state.placements[0].state == "recovering"
    assert state.placements[0].view == 1
    assert apply(state, GrantLease(last.following(), [])) == "bad-members"
    without = last.following((Member(1, 1, 1),))
    assert apply(state, GrantLease(without, [placement(0)])) == "bad-placements"
    assert apply(state, GrantLease(without, [placement(0, state="parked")])) == "bad-placements"
    assert apply(state, GrantLease(without, [placement(0, 2, "recovering")])) == "bad-placements"
    moved_nodes = msgspec.structs.replace(
        placement(0, 2), replicas=(Replica("x", "127.0.0.1:1"), Replica("y", "127.0.0.1:2"))
    )
    assert apply(state, GrantLease(without, [moved_nodes])) == "bad-placements"
    assert apply(state, GrantLease(without, [])) == ""
    assert apply(state, RemoveShard(0, 1, 4)) == ""
    assert recovered(state, 2) == "bad-placements"
    assert recovered(state, 4) == ""
    assert state.recovering == {}
    assert apply(state, RemoveShard(0, 1, 5)) == "other-view"


def test_the_limit_stays_over_all_attempts_of_one_outage() -> None:
    state = with_leases(2)
    last = state.last
    assert last is not None
    apply(state, RemoveShard(0, 1, 2))
    apply(state, GrantLease(last.following((Member(1, 1, 1),)), []))
    for recovery in (2, 3, 3, 7):
        assert apply(state, RemoveShard(0, 1, recovery)) == ""
        assert state.recovering[0].limit == last.stop
    assert apply(state, RemoveShard(0, 3, 8)) == ""  # from a view that was decided meanwhile
    assert apply(state, RemoveShard(0, 1, 7)) == "other-view"
    assert recovered(state, 8) == ""
    last = state.last
    assert last is not None
    assert apply(state, RemoveShard(0, 8, 9)) == ""
    assert state.recovering[0].limit == last.stop


def test_a_shard_without_a_lease_or_in_another_view_is_not_removed() -> None:
    assert apply(created(), RemoveShard(0, 1, 2)) == "no-such-shard"
    state = with_leases(1)
    assert apply(state, RemoveShard(5, 1, 2)) == "no-such-shard"
    for view, recovery in ((0, 2), (1, 1)):
        assert apply(state, RemoveShard(0, view, recovery)) == "other-view"
    # A lease cannot change it, either.
    assert state.last is not None
    lease = state.last.following((Member(1, 1, 1),))
    assert apply(state, GrantLease(lease, [placement(0, 1, "recovering")])) == "bad-placements"


def test_shard_is_removed_by_a_failure_handler_in_a_later_view() -> None:
    """A rebuild may miss a decision that a node of the failure handler commits later."""
    state = with_leases(1)
    assert apply(state, RemoveShard(0, 2, 3)) == ""
    assert (state.placements[0].view, state.placements[0].state) == (1, "recovering")
    assert apply(state, RemoveShard(0, 1, 2)) == "other-view", "an earlier recovery"
    assert recovered(state, 2) == "bad-placements"
    assert recovered(state, 3) == ""


def test_losses_are_of_the_recovery_under_way_and_go_with_the_log() -> None:
    state = with_leases(3, epochs=1, epoch_size=100)
    assert apply(state, RecordLoss(0, 2, 5, 9)) == "other-view"
    apply(state, RemoveShard(0, 1, 2))
    assert apply(state, RecordLoss(0, 3, 5, 9)) == "other-view"
    for start, stop in ((9, 9), (9, 5), (5, 302)):
        assert apply(state, RecordLoss(0, 2, start, stop)) == "no-such-position"
    for _ in range(2):
        assert apply(state, RecordLoss(0, 2, 250, 301)) == ""
    assert state.losses == [RecordLoss(0, 2, 250, 301)]
    copy = ClusterState()
    copy.restore(state.snapshot())
    copy.check()
    assert (copy.losses, copy.recovering) == (state.losses, state.recovering)
    apply(state, SetTrim(300))
    assert len(state.losses) == 1
    assert recovered(state, 2) == ""
    apply(state, SetTrim(301))
    assert state.losses == []


def test_the_latest_losses_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mms.state.MAX_LOSSES", 3)
    state = with_leases(1)
    for recovery in range(2, 8):
        assert apply(state, RemoveShard(0, recovery - 1 if recovery > 2 else 1, recovery)) == ""
        assert apply(state, RecordLoss(0, recovery, recovery, 100)) == ""
    assert [loss.view for loss in state.losses] == [5, 6, 7]


def test_a_snapshot_from_before_recoveries_is_read() -> None:
    state = with_leases(2)
    old = msgspec.msgpack.encode(msgspec.msgpack.decode(state.snapshot())[:6])
    copy = ClusterState()
    copy.restore(old)
    copy.check()
    assert copy.snapshot() == state.snapshot()


def test_a_year_of_idleness_fits_in_kilobytes() -> None:
    state = with_leases(3, epochs=16, epoch_ms=1000)
    last = state.last
    assert last is not None
    leases_of_a_year = 365 * 24 * 3600 // 16
    # The same run, a year later: only its size counts.
    run = state.runs[0]
    later = run.numbered(1, NO_DIGEST)
    later = msgspec.structs.replace(
        later,
        number=leases_of_a_year,
        base=1 + (leases_of_a_year - 1) * 16 * 2**24,
        first_epoch=(leases_of_a_year - 1) * 16,
    )
    state.runs = [LeaseRun(run.first, leases_of_a_year, later)]
    state.check()
    assert len(state.snapshot()) < 1024
    for lease in (later.following(), later.following().following()):
        assert apply(state, GrantLease(lease, [])) == ""
        assert len(state.runs) == 1
    assert len(state.snapshot()) < 1024


def test_the_trim_point_only_rises_and_takes_the_history_with_it() -> None:
    state = created()
    lease = first_lease(epochs=2, epoch_size=10)
    for number in range(6):
        assert apply(state, GrantLease(lease, [])) == ""
        lease = lease.following(epoch_ms=10 + number)  # none repeats
    last = state.last
    assert last is not None
    assert apply(state, SetTrim(45)) == ""
    assert state.trim == 45
    assert state.runs[0].first.base == 41
    assert apply(state, SetTrim(7)) == ""
    assert state.trim == 45
    assert apply(state, SetTrim(last.stop)) == "no-such-position"
    assert [run.first.number for run in state.runs_from(1)] == [3, 4, 5, 6]


def test_the_finalized_epoch_only_rises_and_was_given_out() -> None:
    state = with_leases(1)
    assert apply(state, SetFinalized(16)) == "no-such-position"
    assert apply(state, SetFinalized(5)) == ""
    assert apply(state, SetFinalized(3)) == ""
    assert state.finalized == 5


def test_runs_after_a_lease_begin_right_behind_it() -> None:
    state, chain = created(), [first_lease(epochs=2, epoch_size=8)]
    for number in range(1, 12):
        ms = 10 if number % 4 else 11
        chain.append(chain[-1].following(epoch_ms=ms))
    for lease in chain:
        assert apply(state, GrantLease(lease, [])) == ""
    digests = [NO_DIGEST, *(lease.digest for lease in chain)]
    for held, digest in enumerate(digests):
        runs = state.runs_after(held, digest)
        assert sum(run.count for run in runs) == len(chain) - held
        if runs:
            assert runs[0].first == chain[held]
            assert runs[-1].last == chain[-1]
        assert not state.contradicts(held, digest)
        assert held == 0 or state.contradicts(held, b"another!")
        assert held == 0 or state.numbered(held) == chain[held - 1]
    assert state.contradicts(13, b"unknown!")


def test_history_is_cut_to_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    state, lease = created(), first_lease()
    for _ in range(10):
        assert apply(state, GrantLease(lease, [])) == ""
        lease = lease.following(epoch_ms=lease.epoch_ms + 1)
    assert len(state.runs_from(1)) == 10
    size = state.runs[0].max_bytes
    monkeypatch.setattr("ziplog.core.view.MAX_RUNS_BYTES", 4 * size - 1)
    assert state.runs_from(1) == state.runs[:3]
    assert state.runs_from(state.runs[4].first.base) == state.runs[4:7]
    assert state.runs_after(0, NO_DIGEST) == state.runs[:3]
    assert state.runs_until(lease.base, 100) == state.runs[-3:]
    monkeypatch.setattr("ziplog.core.view.MAX_RUNS_BYTES", 0)
    assert state.runs_from(1) == state.runs[:1]
    assert state.runs_until(lease.base, 100) == state.runs[-1:]
    assert state.runs_from(lease.base) == []
    assert state.lease_at(lease.base) is None
    assert state.lease_at(lease.base - 1) == state.last


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_and_change_nothing(command: bytes) -> None:
    state = with_leases(1)
    before = state.snapshot()
    if decode_refusal(state.apply(command)):
        assert state.snapshot() == before
    state.check()


class StateMachine(RuleBasedStateMachine):
    """Against a model that keeps every lease."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ClusterState()
        self.log: list[bytes] = []
        self.leases: list[Lease] = []
        self.trim = 0
        self.finalized = -1

    def apply(self, command: Command) -> str:
        self.log.append(command.encode())
        return decode_refusal(self.state.apply(self.log[-1]))

    @initialize()
    def create(self) -> None:
        self.apply(CreateCluster(CLUSTER, "c", [placement(0), placement(1)]))

    @rule(
        epoch_ms=st.sampled_from([10, 1000]),
        epochs=st.integers(1, 3),
        size=st.integers(1, 3),
        weight=st.sampled_from([1, 1, 2]),
        twice=st.booleans(),
    )
    def grant(self, epoch_ms: int, epochs: int, size: int, weight: int, *, twice: bool) -> None:
        members = (Member(0, 1, weight), Member(1, 1, 1))
        if self.leases:
            lease = self.leases[-1].following(
                members, epochs=epochs, epoch_size=size, epoch_ms=epoch_ms
            )
        else:
            lease = Lease(1, NO_DIGEST, 1, 0, epochs, size, epoch_ms, members)
        for _ in range(1 + twice):
            assert self.apply(GrantLease(lease, [])) == ""
        self.leases.append(lease)

    @rule(count=st.integers(1, 5))
    def repeat(self, count: int) -> None:
        for _ in range(count if self.leases else 0):
            self.leases.append(self.leases[-1].following())
            assert self.apply(GrantLease(self.leases[-1], [])) == ""

    @rule(data=st.data())
    def grant_wrong(self, data: st.DataObject) -> None:
        if self.leases:
            old = data.draw(st.sampled_from(self.leases)).following(epoch_ms=999)
            refused = self.apply(GrantLease(old, []))
            if old.predecessor == self.leases[-1].digest:
                self.leases.append(old)
            assert (refused == "") == (old == self.leases[-1])

    @rule(gsn=st.integers(0, 60))
    def set_trim(self, gsn: int) -> None:
        given_out = bool(self.leases) and gsn < self.leases[-1].stop
        assert (self.apply(SetTrim(gsn)) == "") == given_out
        if given_out:
            self.trim = max(self.trim, gsn)

    @rule(epoch=st.integers(0, 20))
    def set_finalized(self, epoch: int) -> None:
        if self.apply(SetFinalized(epoch)) == "":
            self.finalized = max(self.finalized, epoch)

    @invariant()
    def agrees(self) -> None:
        state = self.state
        state.check()
        assert (state.trim, state.finalized) == (self.trim, self.finalized)
        assert state.last == (self.leases[-1] if self.leases else None)
        for lease in self.leases:
            if lease.base >= self.trim:
                found = state.lease_at(lease.base)
                assert found is not None
                assert (found.number, found.base, found.members) == (
                    lease.number, lease.base, lease.members
                )  # fmt: skip

    @invariant()
    def a_snapshot_is_the_state(self) -> None:
        copy = ClusterState()
        copy.restore(self.state.snapshot())
        assert copy.snapshot() == self.state.snapshot()
        replayed = ClusterState()
        for command in self.log:
            replayed.apply(command)
        assert replayed.snapshot() == self.state.snapshot()


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = examples(30, stateful_step_count=15)


def test_the_log_keeps_the_level_that_it_was_made_with() -> None:
    state = ClusterState()
    apply(state, CreateCluster(CLUSTER, "c", [placement(0)], "disk"))
    other = ClusterState()
    other.restore(state.snapshot())
    assert (state.durability, other.durability) == ("disk", "disk")
