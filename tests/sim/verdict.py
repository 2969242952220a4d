"""Checks of a run against the guarantees, during the run and at its end.

The checks themselves are in other modules (checks, linearizability, history). This module converts
the servers' state and the clients' histories to their plain data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logdb.wire import decode
from tests.sim import checks
from tests.sim.linearizability import explain
from tests.sim.ownership import Lease, Ownership
from tests.sim.rows import once
from tests.simulator.kernel import S
from ziplog.client.common.requests import FetchRequest, SubscribeRequest
from ziplog.core.entries import Expire, Place, Skip, decode_body
from ziplog.core.view import fingerprint
from ziplog.errors import ProtocolError
from ziplog.segments.entry import UnreadableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shard.state.replica_state import ReplicaState
    from tests.sim.cluster import SimCluster
    from tests.sim.history import History, Operation
    from tests.simulator.kernel import Kernel
    from ziplog.core.view import LeaseRun, Placement
    from ziplog.segments.entry import Entry

#: (shard, start, stop)
Loss = tuple[int, int, int]

#: Bytes of a server's log per check.
_LOOK_BYTES: Final = 1 << 30
#: Virtual time after the last fault within which all calls end and the cluster is whole.
HEALED_NS: Final = 60 * S
#: Maximum number of calls, and of states, of the linearizability check.
_SMALL_CALLS: Final = 120
_SMALL_STATES: Final = 5_000


class Monitor:
    """Periodic check of the servers: stable entries never change."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster: Final = cluster
        self._ownership: Final = Ownership()
        #: All entries that were ever stable.
        self.logs: Final = checks.StableLogs(self._ownership)
        #: The losses reported by the membership service: (shard, start, stop).
        self.losses: Final[list[Loss]] = []
        self._starts: Final[dict[str, int]] = {}
        #: All placements of shards over regions: (time, shard, view, regions).
        self.placements: Final[list[tuple[int, int, int, list[str]]]] = []
        self._placed: Final[dict[int, tuple[int, list[str]]]] = {}
        # A trim may drop a lease before the next look.
        cluster.mms.on_applied = self._learn_committed

    def check(self) -> None:
        """Check every running server."""
        self._learn()
        for name in self._cluster.disks:
            state = self._cluster.state_of(name)
            if state is not None:
                self._check_server(name, state)
        for shard, placement in self._cluster.state.placements.items():
            log = self.logs.shard(shard)
            if placement.state == "finalized" and log.was_member:
                self._check_finalized(log, placement)

    def _check_finalized(self, log: checks.StableLog, placement: Placement) -> None:
        """Check that a finalized shard has decided and stored all its positions."""
        if log.is_complete:
            log.seal()
        for replica in placement.replicas:
            state = self._cluster.state_of(replica.name)
            if state is None or (state.server_state, state.view) != ("up", placement.view):
                continue
            open_gsn = self._ownership.next_owned(log.shard, state.frontier)
            assert open_gsn >= self._ownership.limit(log.shard), (
                f"shard {log.shard} is finalized, and {replica.name} has not decided {open_gsn}"
            )
            last, written = state.store.last_fseq, state.store.flushed_fseq
            assert written == last, (
                f"shard {log.shard} is finalized, and {replica.name} has {written} of its {last}"
                " entries on its disk"
            )

    def _learn_committed(self) -> None:
        self._learn_leases()
        self._learn_losses()  # At once: the level in force may change with the next command.
        if self._cluster.plan.regions is not None:
            self._learn_placements()

    def _learn_placements(self) -> None:
        for shard, placement in self._cluster.state.placements.items():
            regions = [replica.region for replica in placement.replicas]
            if self._placed.get(shard) == (placement.view, regions):
                continue
            if shard not in self._placed:
                required = self._cluster.config.required_regions
                assert len(set(regions)) >= required, (
                    f"shard {shard} joined with servers in {regions}: {required} are required"
                )
            self._placed[shard] = (placement.view, regions)
            self.placements.append((self._cluster.kernel.now, shard, placement.view, regions))

    def _learn_leases(self) -> None:
        known, runs = self._ownership.stop, self._cluster.state.runs
        if runs and runs[-1].last.stop > known:
            self._ownership.learn(lease_of(run) for run in runs if run.last.stop > known)

    def _learn(self) -> None:
        self._learn_leases()
        self._learn_losses()

    def _learn_losses(self) -> None:
        state = self._cluster.state
        for loss in state.losses:
            found = (loss.shard, loss.start, loss.stop)
            if found not in self.losses:
                is_excused = state.durability == "memory" or self._cluster.has_weakened
                assert is_excused, f"{loss} is reported as lost, and the level in force is disk"
                self.losses.append(found)
                self.logs.shard(loss.shard).allow_loss(loss.start, loss.stop)

    def _check_server(self, name: str, state: ReplicaState) -> None:
        placement = self._cluster.state.placements.get(state.shard)
        if placement is None:
            return
        if state.view > placement.view and not self._cluster.has_lost_servers(state.shard):
            return  # losses of its view are reported when the shard is back
        self._check_disks(name, state, placement)
        log = self.logs.shard(state.shard)
        if self._starts.get(name) != self._cluster.nodes[name].starts:
            self._starts[name] = self._cluster.nodes[name].starts
            log.restarted(name)
        known, stable = log.observed(name), state.stream.stable
        try:
            entries = state.store.read_after(known, _LOOK_BYTES) if stable > known else []
        except UnreadableError:
            return  # the repair comes first
        if stable > known and (not entries or entries[-1].fseq < stable):
            return  # the entries between are unreadable until their repair
        log.observe(name, stable, map(plain, entries), state.frontier)

    def _check_disks(self, name: str, state: ReplicaState, placement: Placement) -> None:
        """Check that at level `disk` what a server counts as stable is on the disk of each replica.

        Also on that of a replica that crashed: all replicas had joined the view on their disks.
        """
        cluster = self._cluster
        is_damaged = any(fault.kind == "rot" for fault in cluster.plan.faults)
        if cluster.plan.durability != "disk" or cluster.levels or is_damaged:
            return
        if (state.server_state, state.view) != ("up", placement.view):
            return
        for peer in (name, *cluster.peers(name)):
            other = cluster.state_of(peer)
            if other is None or other.server_state not in {"up", "limbo"}:
                continue
            if placement.replicas[other.server].fingerprint != fingerprint(other.config.identity):
                continue  # It lost its directory.
            on_disk = other.store.flushed_fseq
            assert state.stream.stable <= on_disk, (
                f"{name} counts entry {state.stream.stable} as stable, and the disk of {peer}"
                f" ends at {on_disk}"
            )

    def check_end(self) -> None:
        """Check all entries of the servers of a whole shard."""
        self.check()
        by_shard: dict[int, dict[str, tuple[int, list[checks.Entry]]]] = {}
        for name in [name for name in self._cluster.disks if name not in self._cluster.lost]:
            state = self._cluster.state_of(name)
            assert state is not None, f"{name} is down, although the cluster is whole"
            try:
                entries = [plain(entry) for entry in state.store.read_after(0, _LOOK_BYTES)]
            except UnreadableError:
                continue  # a damaged entry without a read has no repair yet
            by_shard.setdefault(state.shard, {})[name] = (state.stream.stable, entries)
            is_finalized = self._cluster.state.placements[state.shard].state == "finalized"
            if is_finalized and self.logs.shard(state.shard).was_member:
                self._check_sealed(name, state)
        self._check_labels()
        for shard, logs in by_shard.items():
            checks.check_replicas_agree(shard, logs)
            for _, entries in logs.values():
                checks.check_exactly_once(shard, entries)

    def _check_labels(self) -> None:
        """Check that the placements of live shards have the regions of the cluster file."""
        for shard in self._cluster.config.shards:
            placement = self._cluster.state.placements.get(shard.id)
            if placement is not None and placement.state == "live":
                placed = [replica.region for replica in placement.replicas]
                labels = [node.region or "" for node in shard.replicas]
                assert placed == labels, f"shard {shard.id} is placed in {placed}, not {labels}"

    def _check_sealed(self, name: str, state: ReplicaState) -> None:
        """Check that all entries of a finalized shard are decided and on all replicas' disks."""
        log, store, stream = self.logs.shard(state.shard), state.store, state.stream
        assert log.sealed is not None, f"{name}'s shard is finalized and not complete"
        reached = {log.sealed, store.last_fseq, store.flushed_fseq, stream.stable}
        assert len(reached) == 1, (
            f"{name}: the shard was finalized with {log.sealed} entries; it has {store.last_fseq},"
            f" {stream.stable} of them stable, {store.flushed_fseq} on disk"
        )


def lease_of(run: LeaseRun) -> Lease:
    """Return a run of equal leases as plain data."""
    first = run.first
    weights = tuple((member.shard, member.weight) for member in first.members)
    return Lease(first.base, run.last.stop, first.first_epoch, first.epoch_size, weights)


def plain(entry: Entry) -> checks.Entry:
    """Return an entry as plain data."""
    match entry.decision:
        case Place() as place:
            body = place.body or b""
            payloads = tuple(decode_body(body, len(place.gsns)).payloads)
            return checks.Placed(
                entry.fseq, entry.view, place.epoch, place.client, place.seq,
                tuple(place.gsns), body, payloads,
            )  # fmt: skip
        case Skip(start, stop):
            return checks.Skipped(entry.fseq, entry.view, start, stop)
        case Expire(client):
            return checks.Expired(entry.fseq, entry.view, client)
    raise AssertionError(f"{entry.decision} has no number")


def final(
    cluster: SimCluster, history: History, monitor: Monitor, *, healed: int, alive: set[str]
) -> bool:
    """Check a finished run: the cluster is whole, and every call has ended.

    Args:
        cluster: the cluster, whole again.
        history: of all clients.
        monitor: the monitor of the run.
        healed: the end of the last fault, in virtual nanoseconds.
        alive: the names of clients that were not killed.

    Returns:
        Whether the history was small enough for the linearizability check, which succeeded.

    """
    monitor.check_end()
    history.losses(cluster.kernel.now, monitor.losses)
    history.placements(monitor.placements)
    history.check(allow_loss=bool(monitor.losses))
    stored = once(_not_lost(monitor.logs.records.values(), monitor.losses))
    records = {r.gsn: r for r in stored}
    _deliveries(history, monitor.losses).check_against(records)
    checks.check_insert_order(history.operations, records.values())
    dead = {operation.client for operation in history.operations} - alive
    late = checks.unfinished(history, cluster.kernel.now, HEALED_NS, healed=healed, dead=dead)
    assert not late, f"ended too late, or never: {'; '.join(map(str, late[:5]))}"
    if len(history.operations) > _SMALL_CALLS:
        return False
    found = explain(history.operations, budget_states=_SMALL_STATES, lost=monitor.losses)
    assert found is None or not found.is_decided, str(found)
    return found is None


def _not_lost(rows: Iterable[checks.Row], losses: Iterable[Loss]) -> list[checks.Row]:
    """Return the records at positions that are not reported as lost."""
    return [
        row
        for row in rows
        if not any(shard == row.shard and start <= row.gsn < stop for shard, start, stop in losses)
    ]


def _deliveries(history: History, losses: Iterable[Loss]) -> checks.Deliveries:
    """Return the deliveries of all subscriptions, except lost positions."""
    deliveries = checks.Deliveries()
    for operation in history.operations:
        if not isinstance(operation.request, FetchRequest) or operation.of is None:
            continue
        subscription = history.operations[operation.of]
        assert isinstance(subscription.request, SubscribeRequest)
        start = subscription.request.start.gsn
        deliveries.add(
            f"{operation.client}, subscription {operation.of},",
            start if start >= 0 else None,
            _not_lost(_rows(operation), losses),
            subscription.request.shards,
        )
    return deliveries


def _rows(operation: Operation) -> list[checks.Row]:
    records = getattr(operation.result, "records", ())
    return [checks.Row(*record.rid, record.payload) for record in records]


def frame_tracer(kernel: Kernel) -> Callable[[str, str, bytes], None]:
    """Return a function that writes every frame to the readable trace."""

    def trace_frame(src: str, dst: str, frame: bytes) -> None:
        try:
            message: Any = decode(frame)
        except ProtocolError:
            message = f"{len(frame)} bytes, no message"
        kernel.trace(f"{src} > {dst}: {str(message)[:300]}")

    return trace_frame
