"""Recovery of a shard after a crash of all servers, with partly unreadable logs."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from shard.recovery import peer_repair, state_transfer
from shard.storage.store import FullError
from tests.checkers import session_tables
from tests.memory_store import MemoryStore
from tests.unit.shard.recovery_world import (
    BACKUP,
    LEASE,
    PRIMARY,
    THIRD,
    begin,
    crash,
    decision,
    freeze,
    heard,
    joined,
    log,
    order,
    promise,
    recover,
    replica,
    send,
    start,
)
from tests.world import CLUSTER, MS, Link, S, World, insert
from ziplog import wire
from ziplog.core.node import LogWarning, Received
from ziplog.segments.entry import BusyError, UnreadableError, WatermarkRecord

if TYPE_CHECKING:
    from collections.abc import Collection

    from ziplog.core.node import Effect


def dark(damaged: Collection[int] = (), others: Collection[int] = ()) -> World:
    """Return a shard after a power loss, with entries that the two servers cannot read.

    It was up for a short time only, so neither server knows any of them to be stable.
    """
    world = start(durability="disk")
    for seq in range(1, 8):
        send(world, insert(seq), PRIMARY, BACKUP)
    world.run(20 * MS)
    assert log(world, PRIMARY) == log(world, BACKUP)
    for name, gone in ((PRIMARY, damaged), (BACKUP, others)):
        world.kill(name)
        store(world, name).damaged = set(gone)
        crash(world, name)
        world.run(5 * MS)
        assert store(world, name).damaged == set(gone)
    return world


@pytest.fixture(autouse=True)
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the servers' warnings, each with the server's name."""
    texts: list[str] = []
    carry_out = World._carry_out

    def watched(world: World, name: str, effect: Effect) -> None:
        if isinstance(effect, LogWarning):
            texts.append(f"{name}: {effect.text}")
        carry_out(world, name, effect)

    monkeypatch.setattr(World, "_carry_out", watched)
    return texts


def store(world: World, name: str) -> MemoryStore:
    return world.stores[name]


def insist(world: World, name: str, duration: int, recovery: int = 2, view: int = 1) -> None:
    """Send a server `Freeze` ten times a second, as the handler does."""
    end = world.now + duration
    while world.now < end:
        order(world, freeze(recovery, view), name)
        world.run(100 * MS)


def claims(world: World, name: str) -> list[tuple[int, int, bool]]:
    """Return a server's claims in order, without repetitions."""
    reports = [m for m in heard(world, wire.Suspect) if m.node == name and m.state == "limbo"]
    found = [(m.last, m.last_view, m.is_damaged) for m in reports]
    return [one for i, one in enumerate(found) if i == 0 or found[i - 1] != one]


def test_recovery_candidate_can_repair_from_a_limbo_peer(warnings: list[str]) -> None:
    world = dark({3, 4}, {6})
    insist(world, PRIMARY, 500 * MS)
    assert store(world, PRIMARY).damaged == set()
    frozen = promise(world, PRIMARY)
    order(world, decision(frozen), PRIMARY, BACKUP)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 2 * S)
    begin(world, 2)
    world.run(2 * S)
    assert [text.split(":")[0] for text in warnings] == [PRIMARY, BACKUP]
    assert all("repaired it with a copy" in text for text in warnings)
    assert log(world, PRIMARY) == log(world, BACKUP)


def test_proof_of_repaired_entries_may_arrive_long_after_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The damaged entries are of an older view than the next one, and exceed one answer."""
    monkeypatch.setattr(peer_repair, "_STORE_BYTES", 1)
    monkeypatch.setattr(state_transfer, "_ANSWER_BYTES", 1)
    world = start(durability="disk")
    for seq in range(1, 8):
        send(world, insert(seq), PRIMARY, BACKUP)
    recover(world, PRIMARY, BACKUP)
    views = [entry.view for entry in log(world, PRIMARY)]
    assert views[2:] == [1] * 5 + [2] * (len(views) - 7)
    for name in (PRIMARY, BACKUP):
        world.kill(name)
        store(world, name).mark = None
        store(world, name).damaged = {3, 4, 5, 6, 7} if name == PRIMARY else set()
        crash(world, name)
    insist(world, PRIMARY, 3 * S, recovery=3, view=2)
    assert store(world, PRIMARY).damaged == set()
    assert heard(world, wire.Frozen)[-1].recovery == 3


def test_trimmed_entries_are_stable_once_the_following_ones_can_be_read() -> None:
    """The watermark record is gone, and the first kept entry is damaged."""
    world = dark()
    for name in (PRIMARY, BACKUP):
        world.kill(name)
        store(world, name).trim(4)
        store(world, name).mark = None
        store(world, name).damaged = {4} if name == PRIMARY else set()
        crash(world, name)
    assert store(world, PRIMARY).first_fseq == 4
    assert replica(world, PRIMARY).state.stream.stable == 0
    insist(world, PRIMARY, 2 * S)
    assert store(world, PRIMARY).damaged == set()
    assert heard(world, wire.Frozen)[-1].stable == 3


def test_a_remembered_view_does_not_matter_in_limbo() -> None:
    """One server was restarted, the other one has left its view."""
    world = dark({3})
    replica(world, BACKUP).state.view = 1
    insist(world, PRIMARY, 300 * MS)
    assert store(world, PRIMARY).damaged == set()


@pytest.mark.parametrize("state", ["starting", "up", "frozen", "joined"])
def test_peer_in_service_does_not_answer_a_limbo_server(state: str) -> None:
    world = dark()
    node = replica(world, BACKUP)
    node.state.server_state = state  # type: ignore[assignment]
    node.state.view = 1
    question = wire.Fetch(CLUSTER, 0, 0, 0, 2, 1, 0)
    assert not node.step(Received(PRIMARY.encode(), question), world.now)


def test_limbo_server_answers_only_limbo_servers() -> None:
    world = dark()
    node = replica(world, BACKUP)
    node.state.view = 1
    step = node.step
    assert step(Received(PRIMARY.encode(), wire.Fetch(CLUSTER, 0, 0, 0, 2, 1, 0)), world.now)
    for cluster, shard, view in ((CLUSTER, 0, 1), (CLUSTER, 1, 0), (CLUSTER + 1, 0, 0)):
        question = wire.Fetch(cluster, shard, view, 0, 2, 1, 0)
        assert not step(Received(PRIMARY.encode(), question), world.now)


def test_unrepairable_candidate_gives_way_to_the_other_server(warnings: list[str]) -> None:
    """The other server has the readable entries and more; it then repairs the damaged one."""
    world = dark({3})
    world.paused.add(BACKUP)
    insist(world, PRIMARY, 8 * S)
    last = store(world, PRIMARY).last_fseq
    assert claims(world, PRIMARY) == [(last, 1, False), (2, 1, True)]
    (text,) = warnings
    assert "cannot lead a recovery" in text
    assert not heard(world, wire.Frozen)
    world.paused.clear()
    frozen = promise(world, BACKUP, 3)
    # No entry is known to be stable yet: the damaged ones are needed to join.
    order(world, decision(frozen, is_confirmed=False), PRIMARY)
    assert replica(world, PRIMARY)._recovery.missing is None, "it must not lead"
    order(world, decision(frozen, is_confirmed=False), BACKUP, PRIMARY)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 5 * S)
    assert store(world, PRIMARY).damaged == set()
    begin(world, 3)
    assert log(world, PRIMARY) == log(world, BACKUP)
    assert not world.halts


def test_a_shorter_claim_still_reports_the_number_of_its_last_attempt() -> None:
    """A handler that forgot that attempt would use its number for another one."""
    world = dark({3})
    store(world, PRIMARY).last_view = 4  # of a failed attempt
    world.paused.add(BACKUP)
    insist(world, PRIMARY, 8 * S)
    assert claims(world, PRIMARY)[-1] == (2, 1, True)
    reports = [one for one in heard(world, wire.Suspect) if one.node == PRIMARY]
    assert reports[-1].recovery == 4


@pytest.mark.parametrize("knew_stable", [False, True])
def test_an_unreadable_log_is_copied_as_a_whole(*, knew_stable: bool) -> None:
    """Its entries cannot be compared with the survivor's, even if they were stable."""
    world = dark()
    held = store(world, PRIMARY)
    world.kill(PRIMARY)
    held.damaged, held.last_view = set(range(1, held.last_fseq + 1)), 0
    if knew_stable:
        held.mark = WatermarkRecord(
            CLUSTER, held.last_fseq, held.last_end, 0, LEASE.number, LEASE.digest
        )
    crash(world, PRIMARY)
    order(world, decision(promise(world, BACKUP, 3)), BACKUP, PRIMARY)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 5 * S)
    assert held.damaged == set()
    begin(world, 3)
    assert log(world, PRIMARY) == log(world, BACKUP) != []
    assert not world.halts


def test_an_unreadable_entry_of_unknown_view_is_not_taken_for_the_survivors() -> None:
    """A file is gone. It held entries of an attempt that failed, as does the file before."""
    world = start(2)
    send(world, insert(1), PRIMARY, BACKUP, THIRD)
    world.run(300 * MS)
    world.links[PRIMARY, BACKUP] = Link(lose=lambda: True)
    for seq in (2, 3):
        send(world, insert(seq), PRIMARY, THIRD)
    for seq in range(4, 9):
        send(world, insert(seq), BACKUP)
    promise(world, BACKUP, 2)
    frozen = promise(world, THIRD, 3)
    assert [entry.view for entry in log(world, BACKUP)] == [1] + [2] * 7
    assert [entry.view for entry in log(world, THIRD)] == [1] * 4 + [3]
    held, lost = store(world, BACKUP), {3, 4, 5}
    world.kill(BACKUP)
    held.damaged = set(lost)
    crash(world, BACKUP, 2)
    view_at = held.view_at
    with patch.object(held, "view_at", lambda fseq: 0 if fseq in lost else view_at(fseq)):
        order(world, decision(frozen), BACKUP, THIRD)
        held.damaged.clear()  # they are cut off
        assert world.run_until(lambda: joined(world, BACKUP, THIRD), 2 * S)
    assert log(world, BACKUP) == log(world, THIRD)
    assert not world.halts


def test_a_log_that_cannot_be_read_is_cut_where_the_survivors_ends() -> None:
    world = dark({3})
    store(world, BACKUP).truncate(4)
    crash(world, BACKUP)
    world.run(5 * MS)
    world.paused.add(BACKUP)
    insist(world, PRIMARY, 8 * S)
    world.paused.clear()
    frozen = promise(world, BACKUP, 3)
    order(world, decision(frozen, is_confirmed=False), BACKUP, PRIMARY)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 5 * S)
    assert log(world, PRIMARY) == log(world, BACKUP)


def test_two_that_are_damaged_at_the_same_place_wait_for_the_operator(warnings: list[str]) -> None:
    """Entries after the damage are not dropped: they may have been acknowledged."""
    world = dark({3}, {3})
    insist(world, PRIMARY, 8 * S)
    insist(world, BACKUP, 5 * S, recovery=3)
    insist(world, PRIMARY, 100 * S, recovery=4)
    assert not heard(world, wire.Frozen)
    assert claims(world, PRIMARY)[-1] == claims(world, BACKUP)[-1] == (2, 1, True)
    assert [text.split(":")[0] for text in warnings] == [PRIMARY, BACKUP]
    assert all("cannot lead a recovery" in text for text in warnings)
    assert all("Restore the missing file" in text for text in warnings)
    store(world, BACKUP).damaged.clear()  # the operator found the file
    insist(world, PRIMARY, 61 * S, recovery=4)
    assert heard(world, wire.Frozen)
    assert claims(world, PRIMARY)[-1][2] is False


@pytest.mark.parametrize("is_known_unrepairable", [False, True])
def test_a_server_leads_once_its_own_disk_can_read_again(
    warnings: list[str], *, is_known_unrepairable: bool
) -> None:
    """The read error has passed before the server looks for the missing entry, or after."""
    world = dark({3}, {3})
    held = store(world, PRIMARY)
    find_hole = held.damaged_after

    def healed(fseq: int) -> tuple[int, int] | None:
        held.damaged.clear()
        return find_hole(fseq)

    if is_known_unrepairable:
        insist(world, PRIMARY, 8 * S)
        assert claims(world, PRIMARY)[-1] == (2, 1, True)
    with patch.object(held, "damaged_after", healed):
        insist(world, PRIMARY, 61 * S if is_known_unrepairable else 1 * S)
    assert heard(world, wire.Frozen)
    assert not replica(world, PRIMARY)._recovery.claim.is_damaged
    assert "can read it now. Check the disk" in warnings[-1]


def test_a_server_joins_once_its_own_disk_can_read_again(warnings: list[str]) -> None:
    """No further message is needed."""
    world = dark()
    frozen = promise(world, BACKUP, 3)
    for name in (PRIMARY, BACKUP):
        store(world, name).damaged = {3}
    order(world, decision(frozen, is_confirmed=False), BACKUP, PRIMARY)
    world.run(10 * S)
    assert not joined(world, PRIMARY)
    store(world, PRIMARY).damaged.clear()
    assert world.run_until(lambda: joined(world, PRIMARY), 61 * S)
    assert "can read it now" in warnings[-1]


def test_a_session_table_that_cannot_be_read_is_not_taken_for_a_passed_error() -> None:
    """All entries can be read, but the table cannot, and no peer sends one."""
    world = dark()

    def last_table() -> None:
        raise UnreadableError("the table is damaged")

    with patch.object(store(world, PRIMARY), "last_table", last_table):
        insist(world, PRIMARY, 2 * S)
        assert claims(world, PRIMARY)[-1][2] is True
        insist(world, PRIMARY, 61 * S)
        assert claims(world, PRIMARY)[-1][2] is True
    assert not heard(world, wire.Frozen)
    insist(world, PRIMARY, 61 * S)
    assert heard(world, wire.Frozen)


def test_an_entry_right_after_the_session_table_is_repaired() -> None:
    """More entries are stable than the table has seen."""
    world = dark()
    held = store(world, PRIMARY)
    world.kill(PRIMARY)
    held.damaged = {3}
    held.mark = WatermarkRecord(CLUSTER, 5, 6, 0, LEASE.number, LEASE.digest)
    crash(world, PRIMARY)
    with patch.object(held, "last_table", lambda: (2, [])):
        insist(world, PRIMARY, 1 * S)
    assert held.damaged == set()
    assert heard(world, wire.Frozen)


def test_a_survivor_that_an_empty_server_cannot_copy_waits_for_the_operator(
    warnings: list[str],
) -> None:
    """Its damaged entry was on the lost disk only. The failure handler learns the reason."""
    world = start(durability="disk")
    for seq in range(1, 8):
        send(world, insert(seq), PRIMARY, BACKUP)
    world.run(200 * MS)
    world.stores[BACKUP] = MemoryStore()
    store(world, PRIMARY).damaged = {3}
    crash(world, BACKUP)
    order(world, decision(promise(world, PRIMARY)), PRIMARY, BACKUP)
    world.run(10 * S)
    assert joined(world, PRIMARY)
    assert not joined(world, BACKUP)
    report = [m for m in heard(world, wire.Suspect) if m.node == PRIMARY][-1]
    assert (report.state, report.last, report.is_damaged) == (
        "joined", store(world, PRIMARY).last_fseq, True
    )  # fmt: skip
    (warning,) = warnings
    assert "no peer could repair it" in warning
    store(world, PRIMARY).damaged.clear()  # the operator found the file
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 3 * S)
    begin(world, 2)
    assert log(world, PRIMARY) == log(world, BACKUP)


def test_a_log_that_the_system_refuses_to_read_now_is_not_missing(warnings: list[str]) -> None:
    """The server leads the recovery as soon as it can read, and claims no damage before."""
    world = dark()

    def busy(*_: object) -> None:
        raise BusyError("too many open files")

    with patch.object(store(world, PRIMARY), "read_after", busy):
        insist(world, PRIMARY, 2 * S)
        assert replica(world, PRIMARY)._recovery.missing is None
    assert not heard(world, wire.Frozen)
    assert [text.split(":")[0] for text in warnings] == [PRIMARY]
    assert not any(is_damaged for _, _, is_damaged in claims(world, PRIMARY))
    insist(world, PRIMARY, 1 * S)
    assert heard(world, wire.Frozen)


def test_a_server_joins_once_the_system_lets_it_read_its_log(warnings: list[str]) -> None:
    """No further message is needed, and it has all sessions of the survivor."""
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    crash(world, PRIMARY)
    frozen = promise(world, BACKUP)

    def busy(*_: object) -> None:
        raise BusyError("too many open files")

    with patch("shard.recovery.state_transfer.entries_after", busy):
        order(world, decision(frozen), BACKUP, PRIMARY)
        world.run(1 * S)
        assert not joined(world, PRIMARY)
    assert warnings
    assert all("cannot join view" in text for text in warnings)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 1 * S)
    here, there = (replica(world, name).state.sessions for name in (PRIMARY, BACKUP))
    assert session_tables(here) == session_tables(there) != []


@pytest.mark.parametrize("fault", [FullError("no space"), UnreadableError("the file is gone")])
@pytest.mark.parametrize("is_witness", [True, False])
def test_a_log_that_cannot_be_cut_now_is_cut_later(
    warnings: list[str], fault: Exception, *, is_witness: bool
) -> None:
    """Retries follow the request interval; the operator is warned once."""
    world = start()
    send(world, insert(1), PRIMARY, BACKUP)
    world.links[PRIMARY, BACKUP] = Link(lose=lambda: True)
    send(world, insert(2), PRIMARY)
    send(world, insert(9), BACKUP)
    del world.links[PRIMARY, BACKUP]
    if not is_witness:
        crash(world, PRIMARY)
    frozen = promise(world, BACKUP)
    tried: list[int] = []

    def truncate(fseq: int) -> None:
        tried.append(fseq)
        raise fault

    with patch.object(store(world, PRIMARY), "truncate", truncate):
        order(world, decision(frozen), BACKUP, PRIMARY)
        world.run(1 * S)
    assert 5 < len(tried) < 15
    assert len(warnings) == (type(fault) is UnreadableError)
    assert all("cannot cut its log: the file is gone" in text for text in warnings)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 1 * S)
    assert log(world, PRIMARY) == log(world, BACKUP)
    assert not world.halts


def test_an_empty_log_after_a_reset_accepts_a_complete_log() -> None:
    """It crashed before it stored entries of the survivor, which had trimmed more."""
    world = start()
    for seq in range(1, 5):
        send(world, insert(seq), PRIMARY, BACKUP)
    world.kill(BACKUP)
    store(world, BACKUP).reset(3, 40)
    crash(world, BACKUP)
    assert store(world, PRIMARY).first_fseq == 1
    frozen = promise(world, PRIMARY)
    order(world, decision(frozen), PRIMARY, BACKUP)
    assert world.run_until(lambda: joined(world, PRIMARY, BACKUP), 1 * S)
    assert log(world, BACKUP) == log(world, PRIMARY)


def test_a_store_that_ends_too_early_is_reported_once(warnings: list[str]) -> None:
    world = dark()
    state = replica(world, PRIMARY).state
    mark = state.stream.stable_mark._replace(fseq=99, end=LEASE.stop)
    state.stream.restore(mark, mark, [])
    insist(world, PRIMARY, 8 * S)
    (text,) = warnings
    assert "but 99 was stable" in text
