"""Pending trims.

    wanting    -- every shard's frontier reached the position --> committing
    committing -- the trim point is committed --> refusing
    refusing   -- every server that is not down refuses trimmed positions --> reply

Rules: only stable positions are trimmed (D45), and, except by force, none that a cursor holds.
Trims are bounded in number and in time: one that is not done in time gets a reply with what it
waits for, and the client sends another one. A request gets one answer, however often it arrives.

Invariant: a trim in `refusing` is committed. See docs/protocol.md, sections 8 and 19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from mms import membership_rules
from mms.commands import SetTrim
from mms.servers import SUSPECT_NS
from ziplog.core.node import Propose, Send
from ziplog.core.units import NS_PER_S
from ziplog.wire import TrimReply, Want

if TYPE_CHECKING:
    from mms.servers import Server, Servers
    from mms.state import ClusterState
    from ziplog.core.cursors import Cursor
    from ziplog.core.node import Effect
    from ziplog.wire import Trim

#: Time until the reply to a trim that is not done. A server that is down delays a trim for less,
#: and the default deadline of a client is later.
_REPLY_NS: Final = 8 * NS_PER_S
#: Shards or servers that a reply names.
_NAMED: Final = 8
#: Maximum number of answers kept for copies of their requests.
_KEPT_ANSWERS: Final = 256
#: Interval between repeated `Want` messages.
_WANT_NS: Final = NS_PER_S // 4


class _Trim:
    __slots__ = (
        "deadline", "force", "gsn", "is_proposed", "phase", "request", "wanted_at"
    )  # fmt: skip

    def __init__(self, message: Trim, now: int) -> None:
        self.request = message.request
        self.gsn, self.force = message.gsn, message.force
        self.deadline = now + _REPLY_NS
        self.phase: Literal["wanting", "committing", "refusing"] = "wanting"
        self.wanted_at: int | None = None
        #: Its command may still be applied. A lost one costs the time until the reply.
        self.is_proposed = False


class Trims:
    """All trims that clients wait for."""

    def __init__(self, state: ClusterState, servers: Servers) -> None:
        self._state, self._servers = state, servers
        self._pending: dict[tuple[bytes, int], _Trim] = {}
        #: The latest answers, for late copies of their requests: a trim that a client was refused
        #: must not be done when the cursor no longer holds.
        self._answers: Final[dict[tuple[bytes, int], TrimReply]] = {}
        self._want_request = 0

    def __len__(self) -> int:
        return len(self._pending)

    def start(self, route: bytes, message: Trim, now: int) -> list[Effect]:
        """Start a client's trim of a leased position; a repeated request changes nothing."""
        key = (route, message.request)
        if key in self._answers:
            return [Send(route, self._answers[key])]
        self._pending.setdefault(key, _Trim(message, now))
        return []

    def abandon(self) -> list[tuple[bytes, int]]:
        """Forget all trims; return their routes and request numbers."""
        abandoned = list(self._pending)
        self._pending.clear()
        return abandoned

    def next_wakeup(self, now: int) -> int | None:
        """Return the latest time of the next `advance`."""
        return now + _WANT_NS if self._pending else None

    def advance(self, now: int) -> list[Effect]:
        """Take the next step of every trim, as far as possible now."""
        effects: list[Effect] = []
        for key, trim in list(self._pending.items()):
            effects += self._want(trim, now)
            effects += self._commit(trim)
            answer = self._answer(trim, now)
            if answer is not None:
                effects.append(self._finish(key, answer))
        return effects

    def _finish(self, key: tuple[bytes, int], answer: TrimReply) -> Effect:
        del self._pending[key]
        self._answers[key] = answer
        if len(self._answers) > _KEPT_ANSWERS:
            del self._answers[next(iter(self._answers))]
        return Send(key[0], answer)

    def _want(self, trim: _Trim, now: int) -> list[Effect]:
        if trim.phase != "wanting":
            return []
        if trim.gsn <= self._state.trim:
            trim.phase = "refusing"
            return []
        unstable = self._shards_below(trim.gsn)
        if not unstable:
            trim.phase = "committing"
            return []
        if trim.wanted_at is not None and now < trim.wanted_at + _WANT_NS:
            return []
        trim.wanted_at = now
        self._want_request += 1
        return [
            Send(primary.route, Want(self._state.cluster, shard, self._want_request, trim.gsn - 1))
            for shard in unstable
            if (primary := self._servers.replicas(shard)[0]).route
        ]

    def _shards_below(self, gsn: int) -> list[int]:
        """Return the shards that may own a position below `gsn` that is not stable."""
        known = membership_rules.frontiers(self._state, self._servers)
        return [shard for shard, frontier in known.items() if frontier < gsn]

    def on_refused(self, command: SetTrim) -> None:
        """Note that consensus refused a trim: a cursor holds."""
        for trim in self._pending.values():
            if (trim.gsn, trim.force) == (command.gsn, command.force):
                trim.is_proposed = False

    def _commit(self, trim: _Trim) -> list[Effect]:
        if trim.phase != "committing":
            return []
        if trim.gsn <= self._state.trim:
            trim.phase = "refusing"
            return []
        if trim.is_proposed or self._holder(trim) is not None:
            return []
        trim.is_proposed = True
        return [Propose(SetTrim(trim.gsn, trim.force).encode())]

    def _holder(self, trim: _Trim) -> Cursor | None:
        """Return the cursor that keeps a trim from being done."""
        return None if trim.force else self._state.cursors.holder(trim.gsn)

    def _answer(self, trim: _Trim, now: int) -> TrimReply | None:
        cluster, committed = self._state.cluster, self._state.trim
        if trim.phase == "refusing" and not self._serving(trim.gsn, now):
            return TrimReply(cluster, trim.request, committed)
        holder = self._holder(trim)
        # A command that was proposed before the cursor held may be applied once it no longer does.
        if holder is not None and trim.phase != "refusing" and not trim.is_proposed:
            obstacle = f"the cursor {holder.name} holds the records from gsn {holder.position} on"
            return TrimReply(
                cluster, trim.request, committed, "not-stable", obstacle, holder.name,
                holder.position, holder.owner_text,
            )  # fmt: skip
        if now < trim.deadline:
            return None
        obstacle = self._obstacle(trim, now)
        return TrimReply(cluster, trim.request, committed, "not-stable", obstacle)

    def _serving(self, gsn: int, now: int) -> list[Server]:
        """Return the servers that may serve trimmed positions, except long silent ones."""
        return [
            server
            for server in self._servers
            if self._servers.silence(server, now) < SUSPECT_NS
            and (server.heartbeat is None or server.heartbeat.trim < gsn)
        ]

    def _obstacle(self, trim: _Trim, now: int) -> str:
        """Return what a trim waits for."""
        if trim.phase == "wanting":
            shards = _listed([str(shard) for shard in self._shards_below(trim.gsn)])
            return f"these shards have undecided positions before it: {shards}"
        if trim.phase == "committing":
            return "most nodes of the membership service have not stored it"
        names = [
            f"{server.name} (its disk is full)" if server.full else server.name
            for server in self._serving(trim.gsn, now)
        ]
        return f"these servers have not recorded it on their disks: {_listed(names)}"


def _listed(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    others = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {others} more" if others > 0 else "")
