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


class Told(NamedTuple):
    """What an announcement makes of a server."""

    #: There are leases that it did not hold.
    has_leases: bool = False
    #: Its shard has gone on without it, in this view; 0: it has not.
    left_for: int = 0
    #: The view that it joined begins.
    view_begins: bool = False


#: Who is placed so has been, in this view, all that a member is.
_BEGUN: Final = {"live", "parked", "leaving", "finalized"}
#: Who is placed so and is in no lease has no more positions; or none for now.
_OUT: Final = {"parked", "leaving", "finalized"}


class Membership:
    """One server's dealings with the membership service."""

    def __init__(self, state: ReplicaState) -> None:
        self._state: Final = state
        #: The service says that the shard is being recovered.
        self.is_recovering = False
        #: When the shard has no more positions, by what is known; None: it has.
        self._out_at: int | None = None

    def is_from_service(self, route: bytes, message: Message) -> bool:
        """Whether a message came over this server's own connection to the membership service.

        Who decides what a server halts on must not be just anybody who can reach its port.
        """
        if route in self._state.service:
            return True
        why = f"{type(message).__name__}: it is no answer of the membership service"
        self._state.out.append(ReportBadMessage(route, why))
        return False

    def announced(self, message: LeaseAnnounced, now: int) -> Told | None:
        """Take an announcement; None if this server cannot go on."""
        state = self._state
        if state.cluster not in (0, message.cluster):
            reason = f"told of cluster {message.cluster}, but this is {state.cluster}"
            state.out.append(Halt(reason))
            return None
        state.cluster = message.cluster
        begins = now + message.starts_in_us * 1000
        try:
            runs = message.runs or state.clock.unfold(message.after, message.steps, message.digest)
            skip_to = runs[0].first.base if runs and message.is_cut else message.trim
            news = state.clock.announce(runs, begins, now, skip_to)
        except LeaseConflictError as error:
            state.out.append(Halt(str(error)))
            return None
        state.clock.left_at = max(state.clock.left_at, message.limit)
        held = state.clock.last
        state.has_gap = message.after > (held.number if held is not None else 0)
        told = Told(news)
        placement = next((p for p in message.placements if p.shard == state.shard), None)
        if placement is not None and state.clock.lease is not None:
            told = self._placed(placement, told)
        self._out_at = state.clock.out_at if state.placed in _OUT else None
        self.look(now)
        return told

    def look(self, now: int) -> bool:
        """Look at the time: whether the shard's last lease is over."""
        self._state.is_out = self._out_at is not None and now >= self._out_at
        return self._state.is_out

    def next_wakeup(self) -> int | None:
        """Return when the shard's last lease is over, if that is yet to come."""
        return None if self._state.is_out else self._out_at

    def _placed(self, placement: Placement, told: Told) -> Told:
        """Take the news of what the membership service has committed about this shard."""
        state = self._state
        state.placed = placement.state
        self.is_recovering = placement.state == "recovering"
        if state.state == "starting":
            self._begin(placement)
        elif state.state != "limbo" and placement.view > state.view:
            return told._replace(left_for=placement.view)
        elif (
            state.state == "joined"
            and placement.state in _BEGUN
            and placement.view == state.view
        ):  # fmt: skip
            return told._replace(view_begins=True)
        return told

    def _begin(self, placement: Placement) -> None:
        """Become part of the shard, unless this server was that before and has forgotten it."""
        state, config = self._state, self._state.config
        known = next((r.fingerprint for r in placement.replicas if r.name == config.name), "")
        if known in {"", fingerprint(config.identity)}:
            state.view = state.view or placement.view
            state.state = "up"
            return
        state.state = "limbo"
        state.out.append(LogWarning(
            f"{config.name} is in limbo: shard {state.shard} knows it with another data directory."
            " What was there is missing here: stop it, put that directory back, and start it"
        ))  # fmt: skip
