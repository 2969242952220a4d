"""The membership service's state from the holdings of servers (docs/protocol.md, section 16)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mms.rebuild import plan, rebuild
from mms.rebuilt_leases import rebuilt_runs
from mms.snapshot import Retired
from mms.state import MAX_LEASE_SIZE, ClusterState
from tests.properties import examples
from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
from ziplog.core.holdings import HandlerHoldings, Holdings, ServerHoldings, ShardRecovery
from ziplog.core.view import (
    MAX_UNRECORDED,
    NO_DIGEST,
    Lease,
    LeaseRun,
    Member,
    Placement,
    Replica,
    ShardState,
    run_of,
)
from ziplog.errors import UnavailableError
from ziplog.types import cluster_id

CLUSTER = 77
SIZE = 2**24
BOTH = (Member(0, 1, 1), Member(1, 1, 2))
FIRST = Lease(1, NO_DIGEST, 1, 0, 16, SIZE, 10, BOTH)
SECOND = FIRST.following((Member(0, 1, 1),))
THIRD = SECOND.following(BOTH)
GAP = MAX_UNRECORDED * MAX_LEASE_SIZE


def config(shards: int = 2, handlers: int = 1, **options: Any) -> ClusterConfig:
    return ClusterConfig(
        name="c",
        data_dir=Path("unused"),
        mms=(NodeConfig("mms-0", "127.0.0.1", 1, 2),),
        failure_handlers=tuple(
            NodeConfig(f"fh-{i}", "127.0.0.1", 10 + i, 20 + i) for i in range(handlers)
        ),
        shards=tuple(
            ShardConfig(
                shard,
                tuple(
                    NodeConfig(f"shard-{shard}-{i}", "127.0.0.1", 100 + 2 * shard + i)
                    for i in range(2)
                ),
            )
            for shard in range(shards)
        ),
        **options,
    )


def placement(shard: int, view: int = 1, state: ShardState = "live") -> Placement:
    names = [f"shard-{shard}-{i}" for i in range(2)]
    return Placement(
        shard,
        view,
        state,
        tuple(
            Replica(name, f"127.0.0.1:{100 + 2 * shard + i}", f"of {name}")
            for i, name in enumerate(names)
        ),
    )


def server(shard: int, index: int, *leases: Lease, **changes: Any) -> ServerHoldings:
    """Return a server that stopped cleanly in view 1."""
    name = f"shard-{shard}-{index}"
    runs = [run_of(lease) for lease in leases or (FIRST,)]
    held = ServerHoldings(
        name, f"of {name}", CLUSTER, 1, 1, 10, 9, 0, runs[-1].last.number, runs, placement(shard), 0
    )
    return replace(held, **changes)


def servers(shards: int = 2, *leases: Lease, **changes: Any) -> list[ServerHoldings]:
    return [server(shard, i, *leases, **changes) for shard in range(shards) for i in range(2)]


def handler(*recoveries: ShardRecovery) -> HandlerHoldings:
    return HandlerHoldings("fh-0", 1, 1, list(recoveries))


def rebuilt(held: list[ServerHoldings], *handlers: HandlerHoldings, **options: Any) -> ClusterState:
    state = rebuild(config(**options), held, handlers).state
    state.check()
    return state


def refused(held: list[ServerHoldings], *handlers: HandlerHoldings, **options: Any) -> str:
    with pytest.raises(UnavailableError) as refusal:
        rebuild(config(**options), held, handlers)
    return str(refusal.value)


@pytest.mark.parametrize("requested", ["memory", "disk"])
@pytest.mark.parametrize("level", ["memory", "disk"])
def test_the_durability_level_is_that_of_the_servers(level: Any, requested: Any) -> None:
    """The cluster file may have been changed since; the servers have not applied that."""
    assert rebuilt(servers(level=level), durability=requested).durability == level
    held = [*servers(1, level="disk"), *servers(2, level="memory")[2:]]
    assert rebuilt(held, durability=requested).durability == "memory"


# --- leases ---


def test_known_positions_keep_their_owners_and_new_ones_are_above_all_that_may_be_used() -> None:
    state = rebuilt(servers(2, FIRST, SECOND, THIRD), handler())
    for lease in (FIRST, SECOND, THIRD):
        for gsn in (lease.base, lease.base + 5, lease.stop - 1):
            found = state.lease_at(gsn)
            assert found is not None
            assert found.owner(gsn) == lease.owner(gsn)
            assert found.epoch_at(gsn) == lease.epoch_at(gsn)
            assert found.number > THIRD.number + MAX_UNRECORDED
    last = state.last
    assert last is not None
    assert last.members == ()
    assert last.stop == THIRD.stop + GAP
    assert state.lease_at(THIRD.stop) is not None
    assert state.next_owned(0, THIRD.stop) == last.stop


def test_leases_of_several_servers_are_one_history() -> None:
    held = servers(2, FIRST)
    held[1] = server(0, 1, SECOND, THIRD)
    held[3] = server(1, 1, FIRST, SECOND)
    runs = rebuild(config(), held, [handler()]).state.runs
    assert [run.first.members for run in runs] == [BOTH, SECOND.members, BOTH, ()]


def test_leases_that_contradict_each_other_are_refused() -> None:
    held = servers(2, FIRST)
    held[3] = server(1, 1, Lease(1, NO_DIGEST, 1, 0, 16, SIZE, 10, SECOND.members))
    assert "recorded different leases 1" in refused(held, handler())


def test_unrecorded_old_leases_are_filled_with_all_shards() -> None:
    state = rebuilt(servers(2, THIRD), handler())
    assert [run.first.members for run in state.runs] == [
        (Member(0, 1, 1), Member(1, 1, 1)), BOTH, ()
    ]  # fmt: skip
    found = state.lease_at(THIRD.base)
    assert found is not None
    assert found.epoch_at(THIRD.base) == THIRD.first_epoch


def test_unrecorded_old_leases_with_epochs_of_different_sizes_are_filled() -> None:
    small = replace(FIRST, epochs=3, epoch_size=7)
    second = small.following(epoch_size=1000)
    third = second.following(epochs=5)
    state = rebuilt(servers(2, third), handler())
    before = [run for run in state.runs if run.last.stop <= third.base]
    assert [run.first.epoch_size for run in before] == [504, 503]
    assert before[-1].last.stop == third.base
    assert before[-1].last.first_epoch + before[-1].last.epochs == third.first_epoch


@pytest.mark.parametrize("change", [{"first_epoch": 0}, {"first_epoch": 100}, {"base": 2**60}])
def test_lease_that_cannot_follow_any_other_is_refused(change: dict[str, int]) -> None:
    odd = replace(FIRST, **{"number": 9, "base": 10, "first_epoch": 3} | change)
    assert "recorded lease 9" in refused(servers(2, odd), handler())


def test_positions_that_a_recovery_decided_are_not_given_again() -> None:
    held = servers(2, FIRST)
    held[2] = server(1, 0, FIRST, end=FIRST.stop + 5 * MAX_LEASE_SIZE)
    last = rebuilt(held, handler()).last
    assert last is not None
    assert last.stop == FIRST.stop + 5 * MAX_LEASE_SIZE + GAP


def test_records_after_all_recorded_leases_belong_to_their_shard() -> None:
    held = servers(2, FIRST)
    held[2] = server(1, 0, FIRST, end=FIRST.stop + 11, records_end=FIRST.stop + 11)
    state = rebuilt(held, handler())
    assert state.next_owned(1, FIRST.stop) == FIRST.stop
    assert state.last is not None
    assert state.last.stop > FIRST.stop + 10 + GAP


def test_the_trim_point_is_the_highest_one_and_cuts_the_history() -> None:
    held = servers(2, FIRST, SECOND, THIRD)
    held[2] = replace(held[2], trim=SECOND.base + 3)
    state = rebuilt(held, handler())
    assert state.trim == SECOND.base + 3
    assert state.runs[0].first.base == SECOND.base


def test_second_rebuild_uses_later_numbers_and_positions() -> None:
    first = rebuilt(servers(2, FIRST), handler())
    last = first.last
    assert last is not None
    granted = last.following(BOTH, epochs=16, epoch_size=SIZE, epoch_ms=10)
    again = [
        replace(one, runs=[*one.runs, *first.runs[1:], run_of(granted)], lease=granted.number)
        for one in servers(2, FIRST)
    ]
    second = rebuilt(again, handler())
    assert second.runs[0].first.number > granted.number + MAX_UNRECORDED
    assert second.last is not None
    assert second.last.stop == granted.stop + GAP
    assert second.next_owned(1, FIRST.stop) == granted.next_owned(1, granted.base)


def test_second_rebuild_before_another_lease_extends_the_leases_without_members() -> None:
    first = rebuilt(servers(2, FIRST), handler())
    assert first.last is not None
    again = [
        replace(one, runs=[*one.runs, *first.runs[1:]], lease=first.last.number)
        for one in servers(2, FIRST)
    ]
    second = rebuilt(again, handler())
    assert [run.first.members for run in second.runs] == [BOTH, ()]
    assert second.last is not None
    assert second.last.stop == first.last.stop + GAP


@examples(200)
@given(st.lists(st.tuples(st.sampled_from((BOTH, SECOND.members)), st.integers(1, 4)), min_size=1),
       st.data())  # fmt: skip
def test_any_parts_of_a_history_give_its_owners(shapes: Any, data: st.DataObject) -> None:
    leases: list[Lease] = []
    for members, count in shapes:
        for _ in range(count):
            last = leases[-1] if leases else None
            leases.append(last.following(members) if last else replace(FIRST, members=members))
    held = []
    for one in servers(2):
        start = data.draw(st.integers(0, len(leases) - 1))
        stop = data.draw(st.integers(start + 1, len(leases)))
        runs = [run_of(lease) for lease in leases[start:stop]]
        held.append(replace(one, runs=runs, lease=runs[-1].last.number))
    held[0] = replace(held[0], runs=[run_of(lease) for lease in leases], lease=len(leases))
    runs = rebuilt_runs(held, 0)
    state = ClusterState()
    state.runs = runs
    for lease in leases:
        found = state.lease_at(lease.base)
        assert found is not None
        assert (found.members, found.first_epoch <= lease.first_epoch) == (lease.members, True)
        assert found.epoch_at(lease.base + SIZE) == lease.epoch_at(lease.base + SIZE)


def test_long_run_is_rebuilt_at_once() -> None:
    last = replace(
        FIRST, number=10**8, base=1 + (10**8 - 1) * 16 * SIZE, first_epoch=16 * (10**8 - 1)
    )
    held = [replace(one, runs=[LeaseRun(FIRST, 10**8, last)], lease=10**8) for one in servers(2)]
    state = rebuilt(held, handler())
    assert state.runs[0].last.stop == last.stop


# --- views ---


def test_shard_continues_in_the_view_of_the_failure_handler() -> None:
    held = [replace(one, view=3, last_view=3, placement=placement(0, 3)) for one in servers(1)]
    known = ShardRecovery(0, 3, 2, is_under_way=False, is_finished=True)
    state = rebuilt([*held, *servers(2)[2:]], handler(known))
    assert (state.placements[0].view, state.placements[0].state) == (3, "parked")
    assert state.placements[1].view == 1


def test_without_the_handler_a_shard_keeps_its_view_if_all_servers_stopped_in_it() -> None:
    assert rebuilt(servers(2)).placements[0].view == 1


@pytest.mark.parametrize("changes", [{"view": 0}, {"last_view": 5}, {"view": 0, "last_view": 5}])
def test_without_the_handler_the_view_is_above_all_that_were_seen(changes: dict[str, Any]) -> None:
    held = servers(2)
    held[1] = replace(held[1], **changes)
    state = rebuilt(held)
    assert state.placements[0].view > max(one.last_view for one in held[:2])
    assert state.placements[1].view == 1


def test_decided_view_that_is_not_finished_is_continued() -> None:
    held = [replace(one, view=0, placement=placement(0, 1)) for one in servers(1)]
    decided = ShardRecovery(0, 4, 1, is_under_way=False, is_finished=False)
    state = rebuilt([*held, *servers(2)[2:]], handler(decided))
    assert state.placements[0].state == "recovering"
    assert (state.placements[0].view, state.recovering[0].recovery) == (1, 4)
    assert state.last is not None
    assert state.recovering[0].limit == state.last.stop


def test_shard_that_servers_know_to_be_back_is_not_recovered_again() -> None:
    held = [replace(one, view=4, last_view=4, placement=placement(0, 4)) for one in servers(1)]
    decided = ShardRecovery(0, 4, 1, is_under_way=False, is_finished=False)
    state = rebuilt([*held, *servers(2)[2:]], handler(decided))
    assert (state.placements[0].view, state.placements[0].state) == (4, "parked")
    assert not state.recovering


def test_handler_behind_the_servers_is_refused() -> None:
    held = [replace(one, placement=placement(0, 4)) for one in servers(1)]
    known = ShardRecovery(0, 3, 2, is_under_way=False, is_finished=True)
    assert "only have view 3" in refused([*held, *servers(2)[2:]], handler(known))


# --- missing directories ---


def test_a_clean_server_in_the_current_view_is_enough() -> None:
    state = rebuilt([server(0, 1), server(1, 0)], handler())
    assert [r.fingerprint for r in state.placements[0].replicas] == ["of shard-0-0", "of shard-0-1"]


def test_directory_that_is_missing_and_unknown_counts_as_lost() -> None:
    unknown = replace(placement(0), replicas=tuple(
        replace(replica, fingerprint="") for replica in placement(0).replicas
    ))  # fmt: skip
    state = rebuilt([server(0, 1, placement=unknown), *servers(2)[2:]], handler())
    assert [r.fingerprint for r in state.placements[0].replicas] == ["unknown", "of shard-0-1"]


@pytest.mark.parametrize(
    ("held", "handlers", "why"),
    [
        (server(0, 0), [], "failure handlers' directories are lost"),
        (server(0, 0, view=0), [handler()], "no other server of the shard stopped cleanly"),
        (
            server(0, 0),
            [handler(ShardRecovery(0, 1, 1, is_under_way=True, is_finished=True))],
            "a recovery of the shard is under way",
        ),
        (
            server(0, 0),
            [handler(ShardRecovery(0, 2, 1, is_under_way=False, is_finished=True))],
            "no other server of the shard stopped cleanly",
        ),
    ],
)
def test_missing_directory_is_named_with_the_reason(
    held: ServerHoldings, handlers: list[HandlerHoldings], why: str
) -> None:
    text = refused([held, *servers(2)[2:]], *handlers)
    assert text.startswith("shard 0: the directory of shard-0-1 is needed, because")
    assert why in text


def test_replaced_directory_is_in_limbo_and_not_needed_if_the_handler_is_here() -> None:
    replaced = server(0, 0, fingerprint="another", placement=None, end=1)
    held = [replaced, server(0, 1, view=0), *servers(2)[2:]]
    state = rebuilt(held, handler())
    assert state.placements[0].replicas[0].fingerprint == "of shard-0-0"
    assert "shard-0-0 is needed" in refused(held)
    old = ShardRecovery(0, 3, 2, is_under_way=False, is_finished=True)
    assert "shard-0-0 is needed" in refused(held, handler(old)), "shard-0-1 does not reach view 3"


def test_server_that_is_lost_for_good_is_not_needed() -> None:
    held = [server(0, 1, view=0), *servers(2)[2:]]
    assert "give `--lost shard-0-0`" in refused(held, handler())
    for handlers, view in (([handler()], 1), ([], 2)):
        state = rebuild(config(), held, handlers, ["shard-0-0"]).state
        assert state.placements[0].view == view
        assert state.placements[0].replicas[0].fingerprint == "of shard-0-0"
    lost = ["shard-0-0", "shard-0-1"]
    with pytest.raises(UnavailableError, match="shard 0: no directory of"):
        rebuild(config(), servers(2)[2:], [handler()], lost)


def test_promises_of_a_clean_server_are_kept_if_the_others_are_lost() -> None:
    """In a later view it would start in limbo, and forget what it promised as a backup."""
    held = [server(0, 1), *servers(2)[2:]]
    assert rebuild(config(), held, [], ["shard-0-0"]).state.placements[0].view == 1


def test_shard_without_any_directory_is_named() -> None:
    assert "shard 1: no directory of shard-1-0, shard-1-1" in refused(servers(1), handler())


def test_minority_of_handlers_is_refused() -> None:
    assert "only fh-0 has its directory" in refused(servers(2), handler(), handlers=3)


def test_crashed_server_without_failure_handlers_is_refused() -> None:
    held = servers(2)
    held[0] = replace(held[0], view=0)
    assert "no failure handler" in refused(held, handlers=0)
    assert rebuilt(servers(2), handlers=0).placements[0].state == "parked"


# --- the cluster, and shards that left ---


def test_directory_of_another_cluster_is_refused() -> None:
    held = servers(2)
    held[3] = replace(held[3], cluster=78)
    text = refused(held, handler(), id=cluster_id(CLUSTER))
    assert "the directory of shard-1-1 is of cluster" in text
    assert cluster_id(78) in text
    assert rebuilt(servers(2), handler(), id=cluster_id(CLUSTER)).cluster == CLUSTER


@pytest.mark.parametrize("left", ["leaving", "finalized"])
def test_shard_that_left_stays_out_with_its_limit(left: ShardState) -> None:
    limit = FIRST.stop
    held = servers(2, FIRST, SECOND)
    held[2:] = [replace(one, placement=placement(1, 1, left), limit=limit) for one in held[2:]]
    state = rebuilt(held, handler())
    assert state.placements[1].state == left
    assert state.retired == {1: Retired(1, limit, left == "finalized")}
    assert state.retirements == 1


def test_leaving_shard_without_a_recorded_limit_has_that_of_all_leases() -> None:
    held = servers(2)
    held[2] = replace(held[2], placement=placement(1, 1, "leaving"))
    state = rebuilt(held, handler())
    assert state.last is not None
    assert state.retired[1].limit == state.last.stop


def test_shard_that_never_joined_is_left_out() -> None:
    fresh = [
        replace(server(2, i), cluster=0, view=0, last_view=0, end=1, records_end=0, lease=0,
                runs=[], placement=None)
        for i in range(2)
    ]  # fmt: skip
    found = rebuild(config(3), [*servers(2), *fresh], [handler()])
    assert sorted(found.state.placements) == [0, 1]
    assert "shard 2 had not joined" in found.notes[0]


def test_shard_with_positions_that_the_file_does_not_name_is_refused() -> None:
    assert "does not name: 1" in refused(servers(2)[:2], handler(), shards=1)


def test_directories_of_an_earlier_release_are_refused() -> None:
    held = [replace(one, runs=[]) for one in servers(2)]
    assert "an earlier release" in refused(held, handler())


def test_the_plan_describes_each_server() -> None:
    held = [server(0, 0, view=0), server(0, 1), server(1, 1)]
    found = plan(config(), Holdings(held, [handler()]))
    assert [shard.servers for shard in found.shards] == [
        ["shard-0-0 (crashed)", "shard-0-1 (stopped cleanly)"],
        ["shard-1-0 (missing)", "shard-1-1 (stopped cleanly)"],
    ]
    assert (found.cluster, found.known_end) == (cluster_id(CLUSTER), FIRST.stop)
    assert found.first_free == FIRST.stop + GAP


def test_wire_version_never_decreases() -> None:
    held = servers(2)
    held[1] = replace(held[1], wire=3)
    assert rebuilt(held, handler()).wire == 3
