"""Fake storage servers for a failure handler: a log is a list, and a state transfer is a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from tests.services import CLUSTER, MS, S
from ziplog.core.node import Received
from ziplog.core.view import NO_DIGEST, Lease, fingerprint
from ziplog.wire import Freeze, Frozen, Heartbeat, LeaseAnnounced, Suspect, ViewDecided

if TYPE_CHECKING:
    from tests.unit.failure_handler.world import World
    from ziplog.core.message import Message

#: Duration of a message, and of a flush.
HOP: Final = MS // 10
FLUSH: Final = 3 * MS

Entry = tuple[int, str]


class FakeServer:
    """A fake storage server for a failure handler."""

    def __init__(self, world: World, name: str, shard: int, index: int) -> None:
        self.world, self.name, self.shard, self.index = world, name, shard, index
        self.identity = f"directory of {name}"
        self.region = ""
        self.alive = True
        self.incarnation = 100 + index
        self.state = "starting"
        self.view = 0
        #: The entries of its log, each with its writer's view; and the number of them on disk.
        self.log: list[Entry] = []
        self.flushed = 0
        self.filled_to = 0
        self.number = 0
        self.decided_end = 0
        self.lease: Lease | None = None
        #: The announced state of its shard; if there is one, it gets no more leases.
        self.placed = ""
        self.is_removed = False
        #: It has all records that its shard will ever own.
        self.sealed = False
        #: Peers that it suspects unconditionally.
        self.always_suspects: set[int] = set()
        self.report_times = {i: world.now for i in range(world.config.f + 1) if i != index}
        self.unfit: set[int] = set()
        self.halted = ""

    @property
    def route(self) -> bytes:
        return f"route {self.name} {self.incarnation}".encode()

    @property
    def suspects(self) -> list[int]:
        now = self.world.now
        return sorted(
            {i for i, heard in self.report_times.items() if now - heard >= S}
            | self.unfit
            | (self.always_suspects - {self.index})
        )

    # --- reports ---

    def tick(self) -> None:
        """Ten times a second."""
        if not self.alive:
            return
        for peer in self.world.peers(self):
            self.world.post(
                self.name, peer.name, lambda p=peer: p.beaten(self.index, self.view, self.state)
            )
        self.send_report()
        if self.world.now - self.world.started >= self.world.heartbeats.get(self.name, 0):
            self.world.heartbeats[self.name] = self.world.now - self.world.started + S
            self.heartbeat()

    def send_report(self) -> None:
        is_fine = not (self.suspects or self.is_removed) and self.state in {"starting", "up"}
        if not self.lease or is_fine:
            return
        last_view = self.log[-1][0] if self.log else 0
        message = Suspect(
            CLUSTER, self.name, self.shard, self.view, self.index, self.incarnation,
            self.state, self.suspects, len(self.log), last_view, self.number, self.identity,
            region=self.region,
        )  # type: ignore[arg-type] # fmt: skip
        for handler in self.world.config.failure_handlers:
            self.world.send_handler(self, handler.name, message)

    def heartbeat(self) -> None:
        lease = self.lease
        states = {"frozen": "up", "joined": "starting"}
        message = Heartbeat(
            CLUSTER if lease else 0, self.name, "127.0.0.1:1", self.shard, self.view,
            self.incarnation, 99, states.get(self.state, self.state), False, 0,
            self.filled_to, 0, lease.number if lease else 0,
            lease.digest if lease else NO_DIGEST, 0, 0, 0, self.identity, self.placed,
            is_sealed=self.sealed, region=self.region,
        )  # type: ignore[arg-type] # fmt: skip
        world = self.world
        world.post(
            self.name, "mms-0",
            lambda: world.step_mms(Received(self.route, message)), message,
        )  # fmt: skip

    def beaten(self, peer: int, view: int, state: str) -> None:
        if not self.alive:
            return
        if view > self.view and state in {"up", "joined"} and self.is_in_view:
            self.stand_by(view)
        is_in_view = view == self.view or (view > self.view and self.state != "starting")
        if is_in_view and state in {"up", "frozen", "joined"}:
            self.report_times[peer] = self.world.now
            self.unfit.discard(peer)
        elif state == "limbo" or 0 < view < self.view:
            self.unfit.add(peer)

    @property
    def is_in_view(self) -> bool:
        return self.state in {"up", "frozen", "joined"}

    def stand_by(self, number: int) -> None:
        """Accept nothing more, but keep the view's entries: they may be needed yet."""
        self.state, self.number = "frozen", max(self.number, number)

    def leave(self) -> None:
        self.state = "limbo"
        del self.log[self.flushed :]

    # --- received messages ---

    def receive(self, src: str, message: Message) -> None:
        if not self.alive or self.halted:
            return
        match message:
            case LeaseAnnounced():
                self.announced(message)
            case Freeze():
                self.freeze(src, message)
            case ViewDecided():
                self.decided(message)

    def announced(self, message: LeaseAnnounced) -> None:
        for run in message.runs:
            if self.lease is None or run.last.number > self.lease.number:
                self.lease = run.last
        placement = next((p for p in message.placements if p.shard == self.shard), None)
        if placement is None:
            return
        self.placed = placement.state
        self.is_removed = placement.state == "recovering"
        known = placement.replicas[self.index].fingerprint
        if self.state == "starting" and placement.state != "joining":
            fits = known in {"", fingerprint(self.identity)}
            self.state, self.view = ("up", placement.view) if fits else ("limbo", 0)
        elif self.is_in_view and placement.view > self.view:
            self.leave()
        elif self.state == "joined" and not self.is_removed and placement.view == self.view:
            self.state = "up"
            self.unfit.clear()
            self.report_times = dict.fromkeys(self.report_times, self.world.now)

    def freeze(self, src: str, message: Freeze) -> None:
        fits = message.view == self.view if self.is_in_view else message.view >= self.view
        if (
            self.state == "starting"
            or not fits
            or message.recovery < self.number
            or message.incarnation not in {0, self.incarnation}
        ):
            return
        if self.state != "frozen" or message.recovery > self.number:
            # The end of the decided view; a failed attempt may have filled the rest.
            decided = sum(1 for view, _ in self.log if view <= message.view)
            is_whole = decided == len(self.log) and self.filled_to >= message.limit
            self.decided_end = message.limit if is_whole else 1 + decided
            if self.filled_to < message.limit:
                self.log.append((message.recovery, f"no-ops to {message.limit}"))
                self.filled_to = message.limit
            if self.state == "limbo":
                self.view = message.view
            self.state, self.number = "frozen", message.recovery
        incarnation = self.incarnation

        def flushed() -> None:
            if self.alive and self.incarnation == incarnation and self.number == message.recovery:
                self.flushed = len(self.log)
                self.world.send_handler(self, src, self.promise())

        self.world.at(FLUSH, flushed)

    def promise(self) -> Frozen:
        return Frozen(
            CLUSTER, self.shard, self.view, self.number, self.index, self.incarnation, 0,
            self.decided_end, len(self.log), 0, digest_of(self.log),
            self.world.config.durability == "disk",
        )  # fmt: skip

    def decided(self, message: ViewDecided) -> None:
        decided = msgspec.structs.replace(message, is_confirmed=True)
        if self.world.views.setdefault((self.shard, message.view), decided) != decided:
            self.halted = f"two decisions about view {message.view}"
        if message.survivor == self.index:
            if (
                self.state == "frozen"
                and message.view == self.number
                and message.incarnation == self.incarnation
            ):
                assert message.digest == digest_of(self.log)
                self.state, self.view = "joined", message.view
        elif message.view >= self.number and message.view > self.view:
            if self.is_in_view:
                self.stand_by(message.view)
            self.number = message.view
            self.world.at(2 * HOP, lambda i=self.incarnation: self.fetch(message, i))

    def fetch(self, decision: ViewDecided, incarnation: int) -> None:
        """Copy the survivor's log, if the survivor is up and has it."""
        survivor = self.world.server(self.shard, decision.survivor)
        if (
            not self.alive
            or (self.incarnation, self.number) != (incarnation, decision.view)
            or self.state not in {"limbo", "frozen"}
        ):
            return
        if (
            survivor.alive
            and survivor.state in {"joined", "up"}
            and survivor.view == decision.view
            and self.world.is_linked(self.name, survivor.name)
        ):
            self.log = survivor.log[: decision.last]
            assert digest_of(self.log) == decision.digest
            self.flushed, self.filled_to = len(self.log), survivor.filled_to
            self.state, self.view = "joined", decision.view
            self.send_report()
            self.heartbeat()
        else:
            self.world.at(100 * MS, lambda: self.fetch(decision, incarnation))

    # --- faults ---

    def crash(self) -> None:
        self.alive = False
        del self.log[self.flushed :]

    def restart(self, *, wiped: bool = False) -> None:
        assert not self.alive
        self.alive = True
        self.incarnation += 1000
        self.state, self.view, self.number = "limbo", 0, 0
        self.unfit.clear()
        if wiped:
            self.identity += "'"
            self.state, self.lease = "starting", None
            self.log, self.flushed, self.filled_to = [], 0, 0
        elif not self.log:
            self.filled_to = 0
        self.report_times = dict.fromkeys(self.report_times, self.world.now + 4 * S)
        self.world.heartbeats[self.name] = 0


def digest_of(log: list[Entry]) -> bytes:
    return repr(log).encode().__hash__().to_bytes(8, "big", signed=True) * 2
