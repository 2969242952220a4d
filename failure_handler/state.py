"""The replicated state of the failure handler: a deterministic state machine.

    settled --Begin--> attempt --Decide--> decided --Finish--> settled, in the next view
    attempt, decided --Begin, of a higher number--> attempt

For each shard: the current view, the newest attempt to reach the next one, and the decision that
began the current view. Rule: a command is applied whole or refused with a reason, and never raises;
applying it twice equals once. Each recovery has one decision, about the candidate that its `Begin`
names, and only the newest attempt has one (D21).

Invariants: `HandlerState.check()`. See docs/protocol.md, section 11.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from ziplog.core.fields import MAX_SHARDS, Unsigned
from ziplog.types import Fseq, Gsn, ShardId, View
from ziplog.wire import LogDigest

Server = Annotated[int, msgspec.Meta(ge=0, lt=16)]


class Attempt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A recovery attempt and its candidate. Each number has one candidate."""

    #: Its number: the view that it leads to.
    recovery: View
    candidate: Server
    #: Of the candidate's process: a restarted one holds less.
    incarnation: Unsigned
    #: All replicas were in limbo: acked records that were only in memory may be lost.
    from_limbo: bool
    #: The view that the candidate remembers: the current one, or an earlier one while no result of
    #: the current one was reported.
    base: View
    #: The log ends before the last confirmed view, so acked records may be missing.
    is_behind: bool = False


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """The state that a view begins with: that of the survivor."""

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
    #: The last view that no recovery goes back before: it is on so many replicas that one of them
    #: survives f failures. No result of a later view was reported to a client.
    confirmed: View
    #: The newest attempt; its number is higher than `view` until it is decided.
    attempt: Attempt
    #: The decision that began `view`; None if there was no recovery, or it is unknown.
    decision: Decision | None = None
    #: The shard is in the leases in `view`.
    is_finished: bool = True

    @property
    def is_under_way(self) -> bool:
        """Whether an attempt is not decided yet."""
        return self.attempt.recovery > self.view


class Command(msgspec.Struct, frozen=True, array_like=True):
    """Base of the failure handler's commands."""

    def encode(self) -> bytes:
        """Return the encoded command."""
        return msgspec.msgpack.encode(self)


class Begin(Command, tag=1, frozen=True):
    """Begin an attempt to recover `shard` from `view`."""

    shard: ShardId
    view: View
    attempt: Attempt


class Decide(Command, tag=2, frozen=True):
    """Set the shard's view to `recovery`."""

    shard: ShardId
    recovery: View
    decision: Decision
    #: The survivor's copy alone is enough.
    is_confirmed: bool


class Finish(Command, tag=3, frozen=True):
    """Record that the shard is in the leases in `view`."""

    shard: ShardId
    view: View


class Confirm(Command, tag=4, frozen=True):
    """Record that enough replicas hold `view`: no recovery goes back before it."""

    shard: ShardId
    view: View


AnyCommand = Begin | Decide | Finish | Confirm

#: Why a command was refused; "" if it was applied.
Refusal = Literal[
    "", "malformed", "too-many-shards", "other-view", "old-recovery", "other-survivor"
]

_decoder: Final[msgspec.msgpack.Decoder[AnyCommand]] = msgspec.msgpack.Decoder(AnyCommand)


class HandlerState:
    """The replicated state; every node of the failure handler holds the same."""

    def __init__(self) -> None:
        #: Every shard that ever had a recovery, by number.
        self.shards: dict[int, Recovered] = {}

    # --- commands ---

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
            case Confirm() | Finish():
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
        # If all replicas are in limbo, their disks count, of whatever view.
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

    def _confirm(self, command: Confirm | Finish) -> Refusal:
        """Confirm or also finish a view, unless a pending attempt may go back before it."""
        shard = self.shards.get(command.shard)
        if shard is None or command.view != shard.view:
            return "other-view"
        if shard.is_under_way:
            return "old-recovery"
        is_finished = shard.is_finished or isinstance(command, Finish)
        self._keep(msgspec.structs.replace(shard, confirmed=shard.view, is_finished=is_finished))
        return ""

    def _keep(self, shard: Recovered) -> None:
        self.shards[shard.shard] = shard

    def snapshot(self) -> bytes:
        """Return the whole state; equal states give equal bytes."""
        return msgspec.msgpack.encode([self.shards[shard] for shard in sorted(self.shards)])

    def restore(self, snapshot: bytes) -> None:
        """Load the state of a snapshot.

        Raises:
            msgspec.MsgspecError: the bytes are not a snapshot.

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
            assert shard.is_finished or shard.decision is not None, (
                "an unfinished view without a decision"
            )
            if shard.decision is not None and not shard.is_under_way:
                attempt, decision = shard.attempt, shard.decision
                assert decision.survivor == attempt.candidate, "the survivor is not the candidate"
                assert decision.incarnation == attempt.incarnation


def decode_refusal(result: bytes) -> Refusal:
    """Return the refusal that `HandlerState.apply` encoded."""
    refusal: Any = msgspec.msgpack.decode(result, type=Refusal)
    return refusal  # type: ignore[no-any-return]


def decode_command(command: bytes) -> AnyCommand:
    """Decode a command that `HandlerState.apply` did not find malformed."""
    return _decoder.decode(command)
