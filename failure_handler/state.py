"""What the failure handler agrees on: a replicated, deterministic state machine.

    settled --Begin--> attempt --Decide--> decided --Finish--> settled, in the next view
    attempt, decided --Begin, of a higher number--> attempt

Per shard: the current view, the newest attempt to give it the next one, and the decision that its
view began with. Rule: a command is either applied whole or refused with a reason, and never raises;
twice is the same as once. There is one decision per recovery, about the candidate that its `Begin`
names, and none from an attempt that is not the newest (D21).

Invariants: `HandlerState.check()`. See docs/protocol.md, section 11.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from ziplog.core.fields import Unsigned
from ziplog.types import Fseq, Gsn, ShardId, View
from ziplog.wire import LogDigest

#: Shards that a failure handler keeps.
MAX_SHARDS: Final = 65_536

Server = Annotated[int, msgspec.Meta(ge=0, lt=16)]


class Attempt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A recovery, and whose state it is to begin with. No number serves two candidates."""

    #: Its number: the view that it leads to.
    recovery: View
    candidate: Server
    #: Of the candidate's process: another one knows less.
    incarnation: Unsigned
    #: All replicas were in limbo: what was acked from memory only may be lost.
    from_limbo: bool
    #: The view that the candidate remembers: the current one, or while nobody has told anything
    #: that is new in that one, one before it.
    base: View


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """What a view begins with: the state of the survivor."""

    survivor: Server
    incarnation: Unsigned
    #: The last entry of its log, and the digest of the log.
    last: Fseq
    digest: LogDigest
    #: Records from here on may be lost; 0: none.
    lost_from: Gsn


class Recovered(msgspec.Struct, frozen=True, array_like=True):
    """A shard that has or had a recovery."""

    shard: ShardId
    #: The current view: the decided one.
    view: View
    #: The last view that nobody goes back behind: so many replicas hold all of it that f failures
    #: leave one. What is new in a later one was told to nobody.
    confirmed: View
    #: The newest attempt; of a higher number than `view` while it is not decided.
    attempt: Attempt
    #: What `view` began with; None if it did so without a recovery, or nobody here knows.
    decision: Decision | None = None
    #: The shard works in `view`.
    is_finished: bool = True

    @property
    def is_under_way(self) -> bool:
        """Whether an attempt is not decided yet."""
        return self.attempt.recovery > self.view


class Command(msgspec.Struct, frozen=True, array_like=True):
    """Base of what consensus carries for the failure handler."""

    def encode(self) -> bytes:
        """Return its bytes."""
        return msgspec.msgpack.encode(self)


class Begin(Command, tag=1, frozen=True):
    """Begin an attempt to recover `shard` from `view`."""

    shard: ShardId
    view: View
    attempt: Attempt


class Decide(Command, tag=2, frozen=True):
    """The shard's view is `recovery` from now on."""

    shard: ShardId
    recovery: View
    decision: Decision
    #: The survivor's is the only copy that it takes.
    is_confirmed: bool


class Finish(Command, tag=3, frozen=True):
    """The shard works in `view`."""

    shard: ShardId
    view: View


class Confirm(Command, tag=4, frozen=True):
    """So many replicas hold all of `view` that nobody goes back behind it."""

    shard: ShardId
    view: View


AnyCommand = Begin | Decide | Finish | Confirm

#: Why a command was refused; "" if it was not.
Refusal = Literal[
    "", "malformed", "too-many-shards", "other-view", "old-recovery", "other-survivor"
]

_decoder: Final[msgspec.msgpack.Decoder[AnyCommand]] = msgspec.msgpack.Decoder(AnyCommand)


class HandlerState:
    """The state; every node of the failure handler holds the same."""

    def __init__(self) -> None:
        #: Every shard that ever had a recovery, by its number.
        self.shards: dict[int, Recovered] = {}

    # --- the machine ---

    def apply(self, command: bytes) -> bytes:
        """Apply a command; return the encoded `Refusal`."""
        return msgspec.msgpack.encode(self._apply(command))

    def _apply(self, command: bytes) -> Refusal:
        try:
            decoded = _decoder.decode(command)
        except (msgspec.MsgspecError, RecursionError):
            return "malformed"
        match decoded:
            case Begin():
                return self._begin(decoded)
            case Decide():
                return self._decide(decoded)
            case Finish():
                return self._finish(decoded)
            case Confirm():
                return self._confirm(decoded)

    def _begin(self, command: Begin) -> Refusal:
        shard, attempt = self.shards.get(command.shard), command.attempt
        if attempt.recovery <= command.view:
            return "old-recovery"
        if shard is None:
            if len(self.shards) >= MAX_SHARDS:
                return "too-many-shards"
            if attempt.base != command.view:
                return "other-view"
            self._keep(Recovered(command.shard, command.view, command.view, attempt))
            return ""
        # If all have forgotten, what is on a disk counts, of whatever view it is.
        first = 0 if attempt.from_limbo else shard.confirmed
        if command.view != shard.view or not first <= attempt.base <= shard.view:
            return "other-view"
        if attempt == shard.attempt:
            return ""
        if attempt.recovery <= shard.attempt.recovery:
            return "old-recovery"
        self._keep(msgspec.structs.replace(shard, attempt=attempt))
        return ""

    def _decide(self, command: Decide) -> Refusal:
        shard, decision = self.shards.get(command.shard), command.decision
        if shard is None or command.recovery != shard.attempt.recovery:
            return "old-recovery"
        if not shard.is_under_way:
            return "" if decision == shard.decision else "old-recovery"
        attempt = shard.attempt
        if (decision.survivor, decision.incarnation) != (attempt.candidate, attempt.incarnation):
            return "other-survivor"
        confirmed = attempt.recovery if command.is_confirmed else shard.confirmed
        self._keep(
            Recovered(
                shard.shard, attempt.recovery, confirmed, attempt, decision, is_finished=False
            )
        )
        return ""

    def _confirm(self, command: Confirm) -> Refusal:
        """Confirm a view, unless an attempt is under way that may go back behind it."""
        shard = self.shards.get(command.shard)
        if shard is None or command.view != shard.view:
            return "other-view"
        if shard.is_under_way:
            return "old-recovery"
        self._keep(msgspec.structs.replace(shard, confirmed=shard.view))
        return ""

    def _finish(self, command: Finish) -> Refusal:
        shard = self.shards.get(command.shard)
        if shard is None or command.view != shard.view:
            return "other-view"
        if shard.is_under_way:
            return "old-recovery"
        self._keep(msgspec.structs.replace(shard, confirmed=shard.view, is_finished=True))
        return ""

    def _keep(self, shard: Recovered) -> None:
        self.shards[shard.shard] = shard

    def snapshot(self) -> bytes:
        """Return the whole state; equal states give equal bytes."""
        return msgspec.msgpack.encode([self.shards[shard] for shard in sorted(self.shards)])

    def restore(self, snapshot: bytes) -> None:
        """Take the state of a snapshot.

        Raises:
            msgspec.MsgspecError: it is none.

        """
        found = msgspec.msgpack.decode(snapshot, type=list[Recovered])
        self.shards = {shard.shard: shard for shard in found}

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self.shards) <= MAX_SHARDS
        for number, shard in self.shards.items():
            assert shard.shard == number
            assert shard.attempt.recovery >= shard.view, "a view without a recovery"
            assert shard.confirmed <= shard.view
            assert shard.attempt.base <= shard.view or not shard.is_under_way
            assert not shard.is_finished or shard.is_under_way or shard.confirmed == shard.view
            assert shard.is_finished or shard.decision is not None, "nothing is to be finished"
            if shard.decision is not None and not shard.is_under_way:
                attempt, decision = shard.attempt, shard.decision
                assert decision.survivor == attempt.candidate, "another server than was asked"
                assert decision.incarnation == attempt.incarnation


def decode_refusal(result: bytes) -> Refusal:
    """Return what `HandlerState.apply` answered."""
    refusal: Any = msgspec.msgpack.decode(result, type=Refusal)
    return refusal  # type: ignore[no-any-return]


def decode_command(command: bytes) -> AnyCommand:
    """Return a command that `HandlerState.apply` did not find malformed."""
    return _decoder.decode(command)
