"""What the membership service says to a server: leases, how its shard is placed, the trim point.

Rule: it counts only over this server's own connection to the service. A server begins with the
first lease, and its next view with a placement that has it (docs/protocol.md, sections 3, 8, 11).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from shard.state.epoch_clock import LeaseConflictError
from ziplog.core.node import Halt, LogWarning, ReportBadMessage
from ziplog.core.view import fingerprint

if TYPE_CHECKING:
    from shard.state.replica_state import ReplicaState
    from ziplog.core.message import Message
    from ziplog.core.view import Placement
    from ziplog.wire import LeaseAnnounced


class LeaseUpdate(NamedTuple):
    """What an announcement makes of a server."""

    #: There are leases that it did not hold.
    has_leases: bool = False
    #: Its shard has gone on without it, in this view; 0: it has not.
    left_for: int = 0
    #: The view that it joined begins.
    view_begins: bool = False


#: Who is placed so has been, in this view, all that a member is.
_IN_VIEW: Final = {"live", "parked", "leaving", "finalized"}
#: Who is placed so and is in no lease has no more positions; or none for now.
_WITHOUT_LEASE: Final = {"parked", "leaving", "finalized"}


class LeaseUpdates:
    """One server's dealings with the membership service."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: The service says that the shard is being recovered.
        self.is_recovering = False
        #: When the shard has no more positions, by what is known; None: it has.
        self._positions_end_at: int | None = None

    def is_from_service(self, route: bytes, message: Message) -> bool:
        """Whether a message came over this server's own connection to the membership service.

        Who decides what a server halts on must not be just anybody who can reach its port.
        """
        if route in self._state.service:
            return True
        why = f"{type(message).__name__}: it is no answer of the membership service"
        self._state.effects.append(ReportBadMessage(route, why))
        return False

    def on_lease_announced(self, message: LeaseAnnounced, now: int) -> LeaseUpdate | None:
        """Take an announcement; None if this server cannot go on."""
        state = self._state
        if state.cluster not in (0, message.cluster):
            reason = f"told of cluster {message.cluster}, but this is {state.cluster}"
            state.effects.append(Halt(reason))
            return None
        state.cluster = message.cluster
        begins = now + message.starts_in_us * 1000
        try:
            runs = message.runs or state.clock.unfold(message.after, message.steps, message.digest)
            skip_to = runs[0].first.base if runs and message.is_cut else message.trim
            news = state.clock.announce(runs, begins, now, skip_to)
        except LeaseConflictError as error:
            state.effects.append(Halt(str(error)))
            return None
        state.clock.left_at = max(state.clock.left_at, message.limit)
        held = state.clock.last
        state.has_gap = message.after > (held.number if held is not None else 0)
        update = LeaseUpdate(news)
        placement = next((p for p in message.placements if p.shard == state.shard), None)
        if placement is not None and state.clock.lease is not None:
            update = self._on_placement(placement, update)
        self._positions_end_at = (
            state.clock.positions_end_at if state.shard_state in _WITHOUT_LEASE else None
        )
        self.tick(now)
        return update

    def tick(self, now: int) -> bool:
        """Look at the time: whether the shard's last lease is over."""
        self._state.has_no_positions = (
            self._positions_end_at is not None and now >= self._positions_end_at
        )
        return self._state.has_no_positions

    def next_wakeup(self) -> int | None:
        """Return when the shard's last lease is over, if that is yet to come."""
        return None if self._state.has_no_positions else self._positions_end_at

    def _on_placement(self, placement: Placement, update: LeaseUpdate) -> LeaseUpdate:
        """Take the news of what the membership service has committed about this shard."""
        state = self._state
        state.shard_state = placement.state
        self.is_recovering = placement.state == "recovering"
        if state.state == "starting":
            self._begin(placement)
        elif state.state != "limbo" and placement.view > state.view:
            return update._replace(left_for=placement.view)
        elif (
            state.state == "joined"
            and placement.state in _IN_VIEW
            and placement.view == state.view
        ):  # fmt: skip
            return update._replace(view_begins=True)
        return update

    def _begin(self, placement: Placement) -> None:
        """Become part of the shard, unless this server was that before and has forgotten it."""
        state, config = self._state, self._state.config
        known = next((r.fingerprint for r in placement.replicas if r.name == config.name), "")
        if known in {"", fingerprint(config.identity)}:
            state.view = state.view or placement.view
            state.state = "up"
            return
        state.state = "limbo"
        state.effects.append(LogWarning(
            f"{config.name} is in limbo: shard {state.shard} knows it with another data directory."
            " What was there is missing here: stop it, put that directory back, and start it"
        ))  # fmt: skip
