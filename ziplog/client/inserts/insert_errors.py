"""The errors of inserts that end without rids.

Rule: `OutcomeUnknownError` if a server may hold a part of the call. Otherwise no record is in the
log, now or later, except those that the error lists in `results`. See docs/protocol.md, section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.client.common.unknown_outcome import UnknownOutcome
from ziplog.core.nearness import named
from ziplog.errors import (
    ConfigError,
    DeadlineError,
    NoSuchRecordError,
    OutcomeUnknownError,
    RecordTooLargeError,
    UnavailableError,
)
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ziplog.client.common.routing import Routing
    from ziplog.client.inserts.inflight import InflightUnit, ShardWindow
    from ziplog.client.inserts.insert_calls import InsertCall
    from ziplog.errors import ZiplogError
    from ziplog.wire.inserts import RefusalCode


#: Maximum number of shards that an error lists.
_SHARDS_SHOWN: Final = 8


def policy_error(error: BaseException) -> Exception:
    """Return the error of a call whose policy raised: the same one, if a future can have it."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    name = type(error).__name__
    found = RuntimeError(f"the policy raised {name}; it must return the id of a shard")
    found.__cause__ = error
    return found


def deadline_error(
    call: InsertCall,
    windows: Mapping[int, ShardWindow],
    routing: Routing,
    *,
    is_unassigned: bool,
    is_session_expired: bool,
    min_regions: int = 1,
) -> tuple[ZiplogError, UnknownOutcome | None]:
    """Return the error of a call at its deadline, and the outcome that stays unknown.

    Args:
        call: the call.
        windows: the in-flight windows, by shard.
        routing: the client's routing.
        is_unassigned: the call's shard is not live.
        is_session_expired: servers may have expired this client's session.
        min_regions: least number of regions of a shard for the call.

    """
    window = windows.get(call.shard)
    units = window.units_of(call) if window else []
    unknown_units = [unit for unit in units if not unit.is_absent]
    where = routing.describe(call.shard)
    if unknown_units:
        spans = [(unit.message.seq, call.unit_ranges[unit.index]) for unit in unknown_units]
        outcome = UnknownOutcome(
            call.shard, call.results, spans, many=call.many, is_append=call.request.sealed
        )
        outcome.is_session_expired = is_session_expired
        return unknown_outcome_error(outcome, windows, routing), outcome
    if units or call.is_partly_placed:
        return not_inserted_error(call, routing, "before the deadline"), None
    if call.shard < 0:
        why = f"no shard of {routing} is live; try again"
        if min_regions > 1:
            wide = [shard for shard in routing.shards if routing.spans(shard, min_regions)]
            states = ", ".join(routing.describe_silent(wide[:_SHARDS_SHOWN]))
            why = (
                f"no shard of {routing} that spans {min_regions} regions is live ({states}):"
                " nothing was inserted; try again"
            )
    elif is_unassigned:
        source = "the policy selected" if call.request.shard is None else "the insert is pinned to"
        why = (
            f"{source} {where}, which is not live (live now: {list(routing.live)});"
            " nothing was inserted"
        )
    else:
        why = (
            f"timed out: too many unacknowledged records of this client at {where};"
            " nothing was inserted: try again"
        )
    return DeadlineError(why), None


def misfit_error(unit: InflightUnit, code: RefusalCode, routing: Routing) -> ZiplogError:
    """Return the error of a call that is too large, or whose `after` does not exist."""
    message, lease = unit.message, routing.lease
    if code == "too-large":
        shard, count, slots = message.shard, message.count, message.count
        if lease is not None and lease.view_of(shard) is not None:
            slots = lease.schedule.slot_from(shard, lease.epoch_size)
        if slots >= count:
            return RecordTooLargeError(len(message.body), routing.limits.max_payload_bytes)
        text = (
            f"{count} records are placed together, but an epoch has {slots} positions of"
            f" {routing.describe(shard)}: insert fewer records in one call"
        )
        return RecordTooLargeError(count, slots, "unit", message=text)
    after = unit.call.request.after if unit.call else RecordId(message.after, message.shard)
    return NoSuchRecordError(after, "no shard owns that position yet")


def not_inserted_error(call: InsertCall, routing: Routing, why: str) -> UnavailableError:
    """Return the error of a call with absent units and no open ones."""
    missing, where = call.results.count(None), routing.describe(call.shard)
    what = f"{missing} of the {len(call.results)} records" if call.many else "the record"
    return UnavailableError(
        f"no replica of {where} accepted {what} {why}, and none will: try again"
    )


def no_space_error(shards: Sequence[int], reason: str) -> UnavailableError:
    """Return the error of a call whose shards have no disk space.

    Args:
        shards: all shards that might take the records.
        reason: what a server of one of them reported.

    """
    some = ", ".join(map(str, shards[:_SHARDS_SHOWN]))
    more = ", ..." if len(shards) > _SHARDS_SHOWN else ""
    if len(shards) == 1:
        problem = f"shard {some} refuses records, because a disk is full"
    else:
        problem = f"shards {some}{more} refuse records, because disks are full"
    return UnavailableError(f"{problem} ({reason})")


def too_few_regions_error(shards: Sequence[int], count: int, routing: Routing) -> ConfigError:
    """Return the error of a call that requires more regions than any of some shards spans."""
    widest = max(shards, key=lambda shard: len(set(routing.regions(shard))), default=-1)
    found = set(routing.regions(widest))
    which = f"shard {widest}" if len(shards) == 1 else f"the widest, shard {widest},"
    sentence = (
        f"min_regions is {count}, but {which} of {routing} spans {len(found)}"
        f" ({named(sorted(found))}): nothing was inserted; require fewer regions, or"
        f" {'insert at another shard' if len(shards) == 1 else 'add a shard that spans so many'}"
    )
    return ConfigError("min_regions", count, f"1 to {len(found)}", message=sentence)


def removed_error(shard: int, routing: Routing) -> UnavailableError:
    """Return the error of a call whose shard was removed before it took a record."""
    error = UnavailableError(
        f"{routing.describe(shard)} takes no more records: nothing was inserted;"
        f" insert at another shard (live now: {list(routing.live)})"
    )
    error.retriable = False
    return error


def partial_insert_error(call: InsertCall, routing: Routing) -> UnavailableError:
    """Return the error of a call of which a recovery lost records but kept later ones."""
    missing, total = call.results.count(None), len(call.results)
    return UnavailableError(
        f"{routing.describe(call.shard)} lost {missing} of the {total} records during recovery"
        " but kept later ones, so the lost records cannot be inserted in their original order;"
        " they are None in `results`: insert them again if they may come after the others"
    )


def add_partial_results(error: ZiplogError, call: InsertCall) -> None:
    """Add `results` to the error of a call with several records, and whether a retry is safe."""
    error.results = call.results
    if call.is_sequential:  # Readers drop duplicates.
        error.retriable |= isinstance(error, OutcomeUnknownError)
    else:  # A retry of the whole call would insert some records twice.
        error.retriable = error.retriable and not call.is_partly_placed


def unknown_outcome_error(
    outcome: UnknownOutcome, windows: Mapping[int, ShardWindow], routing: Routing
) -> OutcomeUnknownError:
    """Return the error of a call with an unknown outcome."""
    unit = windows[outcome.shard].inflight.get(outcome.seq)
    acks = "its servers sent contradictory acks"
    if unit is not None:
        acks = f"of {unit.replicas} replicas, {sorted(unit.acks)} acked"
    return outcome.error(routing.describe(outcome.shard), acks)
