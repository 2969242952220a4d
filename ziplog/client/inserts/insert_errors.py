"""What is said about an insert that ends without its rids.

Rule: `OutcomeUnknownError` if a server may hold some of it; otherwise it is not in the log, but for
what the error names as placed, and never will be. See docs/protocol.md, section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziplog.client.common.unknown_outcome import UnknownOutcome
from ziplog.errors import DeadlineError, OutcomeUnknownError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ziplog.client.common.routing import Routing
    from ziplog.client.inserts.inflight import InsertCall, ShardWindow
    from ziplog.errors import ZiplogError


def deadline_error(
    call: InsertCall,
    windows: Mapping[int, ShardWindow],
    routing: Routing,
    *,
    is_unassigned: bool,
    is_session_expired: bool,
) -> tuple[ZiplogError, UnknownOutcome | None]:
    """Return what to say about a call that ends undecided, and the doubt that is left.

    Args:
        batch: the call.
        lanes: what this client has under way, by shard.
        routing: where shards are.
        is_homeless: its shard is not live.
        is_forgotten: servers may have forgotten what is in doubt.

    """
    window = windows.get(call.shard)
    units = window.units_of(call) if window else []
    unknown_units = [unit for unit in units if not unit.is_absent]
    where = routing.describe(call.shard)
    if unknown_units:
        spans = [(unit.message.seq, call.unit_ranges[unit.index]) for unit in unknown_units]
        outcome = UnknownOutcome(call.shard, call.results, spans, many=call.many)
        outcome.is_session_expired = is_session_expired
        return unknown_outcome_error(outcome, windows, routing), outcome
    if units or call.is_partly_placed:
        return not_inserted_error(call, routing, "before the deadline"), None
    if call.shard < 0:
        why = f"no shard of {routing} is live; try again"
    elif is_unassigned:
        who = "the policy chose" if call.request.shard is None else "it is for"
        why = (
            f"{who} {where}, which is not live (live now: {list(routing.live)});"
            " nothing was inserted"
        )
    else:
        why = (
            f"{where} had no room for the record until the deadline: too much that this client"
            " sent there is undecided; nothing was inserted"
        )
    return DeadlineError(why), None


def not_inserted_error(call: InsertCall, routing: Routing, why: str) -> UnavailableError:
    """Return what to say about a call whose units, but for those placed, are nowhere."""
    missing, where = call.results.count(None), routing.describe(call.shard)
    what = f"{missing} of the {len(call.results)} records" if call.many else "the record"
    return UnavailableError(f"no replica of {where} took {what} {why}, nor will one: try again")


def partial_insert_error(call: InsertCall, routing: Routing) -> UnavailableError:
    """Return what to say about a call of which a recovery kept a later part, and lost another."""
    missing, total = call.results.count(None), len(call.results)
    return UnavailableError(
        f"when {routing.describe(call.shard)} was recovered, it lost {missing} of the {total}"
        " records, and kept some that come later, so those that are missing cannot get their places"
        " any more: `results` has None for each; insert them anew, if they may be behind"
    )


def add_partial_results(error: ZiplogError, call: InsertCall) -> None:
    """Say in the error of a call of several records which are placed, and if it may be repeated."""
    error.results = call.results
    if call.is_sequential:  # readers drop repetitions
        error.retriable |= isinstance(error, OutcomeUnknownError)
    else:  # some of it was done, so the whole must not simply be repeated
        error.retriable = error.retriable and not call.is_partly_placed


def unknown_outcome_error(
    outcome: UnknownOutcome, windows: Mapping[int, ShardWindow], routing: Routing
) -> OutcomeUnknownError:
    """Return what to say about a call whose fate is not known in time."""
    unit = windows[outcome.shard].inflight.get(outcome.seq)
    heard = "its servers contradicted themselves"
    if unit is not None:
        heard = f"of {unit.replicas} replicas, {sorted(unit.acks)} acked"
    return outcome.error(routing.describe(outcome.shard), heard)
