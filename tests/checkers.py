"""Invariants of a world of storage servers, at every moment and when all is quiet.

They use stores and messages, not the code under test. The names are those of the model-checked
invariants: AckedStays, StableAgree, NoDup, DelivAgree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shard.replica import Replica
from shard.state.sessions import END
from tests.world import shard_names
from ziplog.core.entries import Place, Skip, decode_body

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shard.state.sessions import Sessions
    from tests.actors import Client, Job, Reader
    from tests.world import World
    from ziplog.core.entries import SessionTable
    from ziplog.core.view import LeaseRun
    from ziplog.segments.entry import Entry

#: Length of a range whose positions are looked up one by one.
_SHORT_RANGE: Final = 100_000


def replicas_of(world: World, shard: int, f: int) -> list[Replica]:
    nodes = [world.nodes[name] for name in shard_names(shard, f)]
    assert all(isinstance(node, Replica) for node in nodes)
    return [node for node in nodes if isinstance(node, Replica)]


def decided(world: World, name: str) -> list[Entry]:
    """Return all entries that a server decided or applied, in order."""
    return [entry for entry in world.stores[name].history if entry.fseq]


def places(world: World, name: str) -> list[Place]:
    return [e.decision for e in decided(world, name) if isinstance(e.decision, Place)]


def session_tables(sessions: Sessions) -> list[SessionTable]:
    """Return the tables of all decided units, in client order."""
    return sessions.part((b"", 0), END)[0]


def check_held(world: World, client: Client, jobs: Iterable[Job]) -> None:
    """AckedStays: every replica holds each completed unit at the acked slots."""
    by_unit: dict[str, dict[tuple[bytes, int], list[Place]]] = {}
    for job in jobs:
        assert job.gsns is not None
        for name in shard_names(job.shard, client.f):
            node = world.nodes[name]
            assert isinstance(node, Replica)
            session = node.state.sessions.by_client.get(client.id)
            unit = session.units.get(job.seq) if session is not None else None
            if unit is not None and unit.gsns == job.gsns:
                assert unit.confirmed or unit.body == job.body
                continue
            if name not in by_unit:
                by_unit[name] = {}
                for p in places(world, name):
                    by_unit[name].setdefault((p.client, p.seq), []).append(p)
            held = by_unit[name].get((client.id, job.seq), [])
            assert [(p.gsns, p.body) for p in held] == [(job.gsns, job.body)], (
                f"{name} does not hold seq {job.seq} at {job.gsns}"
            )


def check_always(world: World, shards: int, f: int, clients: Sequence[Client]) -> None:
    """Check what must hold at every moment."""
    assert not world.halts
    for client in clients:
        check_held(world, client, [job for job in client.jobs.values() if job.gsns is not None])
    for shard in range(shards):
        primary, *backups = replicas_of(world, shard, f)
        stream = primary.state.stream
        names = shard_names(shard, f)
        truth = decided(world, names[0])
        for name, backup in zip(names[1:], backups, strict=True):
            applied = backup.state.stream
            assert stream.stable <= applied.last, "stable, but not at every replica"
            # The only backup determines by itself what both hold.
            assert applied.stable <= (stream.last if f == 1 else stream.stable)
            assert applied.durable <= stream.durable
            history = decided(world, name)
            assert history == truth[: len(history)], "a backup applied another stream"


def check_quiet(
    world: World, shards: int, f: int, clients: Sequence[Client], runs: Sequence[LeaseRun]
) -> None:
    """Check what must hold once every message arrived and every insert was retried."""
    check_always(world, shards, f, clients)
    for client in clients:
        for job in client.jobs.values():
            assert client.is_stuck(job), f"{client.name} seq {job.seq} never ended"
    for shard in range(shards):
        names = shard_names(shard, f)
        truth = decided(world, names[0])
        assert [entry.fseq for entry in truth] == list(range(1, len(truth) + 1))
        assert all(decided(world, name) == truth for name in names), "replicas differ"
        _check_positions(shard, truth, runs)
        states = [replica.state for replica in replicas_of(world, shard, f)]
        assert len({state.frontier for state in states}) == 1, "frontiers differ"
        for state in states:
            assert state.stream.stable == state.stream.last, "an entry never became stable"
        assert states[0].stream.durable == states[0].stream.last, "an entry never became durable"
        placed = {(p.client, p.seq): p for p in places(world, names[0])}
        assert len(placed) == len(places(world, names[0])), "NoDup: a unit is at two positions"
        for client in clients:
            _check_jobs(client, shard, placed)


def _check_positions(shard: int, truth: Sequence[Entry], runs: Sequence[LeaseRun]) -> None:
    """Every owned position is decided once, upwards, without a hole."""

    def owned(start: int, stop: int) -> list[int]:
        """Return the shard's positions of [start, stop); the leases search a long range."""
        if stop - start <= _SHORT_RANGE:
            return [gsn for gsn in range(start, stop) if _owner(runs, gsn) == shard]
        found: list[int] = []
        for run in runs:
            while (gsn := run.next_owned(shard, start)) < min(stop, run.last.stop):
                found.append(gsn)
                start = gsn + 1
        return found

    end = 1
    for entry in truth:
        decision = entry.decision
        if isinstance(decision, Skip):
            assert end <= decision.start < decision.stop
            assert owned(end, decision.start) == [], "a position was passed undecided"
            end = decision.stop
        elif isinstance(decision, Place):
            run = next(run for run in runs if decision.gsns[0] < run.last.stop)
            lease = run.lease_at(decision.gsns[0])
            assert all(lease.owner(gsn) == shard for gsn in decision.gsns), "not its own position"
            assert {lease.epoch_at(gsn) for gsn in decision.gsns} == {decision.epoch}
            stop = decision.gsns[-1] + 1
            assert owned(end, stop) == decision.gsns, "a position was passed undecided"
            end = stop


def _owner(runs: Sequence[LeaseRun], gsn: int) -> int:
    run = next(run for run in runs if run.first.base <= gsn < run.last.stop)
    return run.lease_at(gsn).owner(gsn)


def _check_jobs(client: Client, shard: int, placed: dict[tuple[bytes, int], Place]) -> None:
    for (at, seq), job in client.jobs.items():
        place = placed.get((client.id, seq)) if at == shard else None
        if place is None:
            assert at != shard or job.gsns is None, "a completed unit is missing"
            continue
        assert job.gsns in (None, place.gsns)
        assert place.body == job.body
        assert place.gsns[0] > job.after, "not after the rid that it names"
        before = placed.get((client.id, job.predecessor))
        if before is not None:
            assert before.gsns[-1] < place.gsns[0], "not after its predecessor"


def check_reader(world: World, reader: Reader) -> None:
    """DelivAgree: a reader got exactly the log from its start on."""
    primary = reader.server.rsplit("-", 1)[0] + "-0"
    log: list[tuple[int, bytes]] = []
    for place in places(world, primary):
        body = decode_body(place.body or b"", len(place.gsns))
        log += zip(place.gsns, body.payloads, strict=True)
    expected = [row for row in log if row[0] >= reader.start]
    if reader.trimmed is not None:
        expected = expected[: len(reader.delivered)]
        assert reader.frontier < reader.trimmed
    assert reader.delivered == expected, f"{reader.name} received another log"
