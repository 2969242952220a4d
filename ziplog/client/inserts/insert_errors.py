"""What is said about an insert that ends without its rids.

Rule: `OutcomeUnknownError` if a server may hold some of it; otherwise it is not in the log, but for
what the error names as placed, and never will be. See docs/protocol.md, section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziplog.client.common.unknown_outcome import Doubt
from ziplog.errors import DeadlineError, OutcomeUnknownError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ziplog.client.common.routing import Routing
    from ziplog.client.inserts.inflight import Batch, Lane
    from ziplog.errors import ZiplogError


def late(
    batch: Batch,
    lanes: Mapping[int, Lane],
    routing: Routing,
    *,
    is_homeless: bool,
    is_forgotten: bool,
) -> tuple[ZiplogError, Doubt | None]:
    """Return what to say about a call that ends undecided, and the doubt that is left.

    Args:
        batch: the call.
        lanes: what this client has under way, by shard.
        routing: where shards are.
        is_homeless: its shard is not live.
        is_forgotten: servers may have forgotten what is in doubt.

    """
    lane = lanes.get(batch.shard)
    units = lane.of(batch) if lane else []
    doubtful = [unit for unit in units if not unit.is_absent]
    where = routing.describe(batch.shard)
    if doubtful:
        spans = [(unit.message.seq, batch.cuts[unit.index]) for unit in doubtful]
        doubt = Doubt(batch.shard, batch.results, spans, many=batch.many)
        doubt.is_forgotten = is_forgotten
        return unknown(doubt, lanes, routing), doubt
    if units or batch.is_begun:
        return untaken(batch, routing, "before the deadline"), None
    if batch.shard < 0:
        why = f"no shard of {routing} is live; try again"
    elif is_homeless:
        who = "the policy chose" if batch.request.shard is None else "it is for"
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


def untaken(batch: Batch, routing: Routing, why: str) -> UnavailableError:
    """Return what to say about a call whose units, but for those placed, are nowhere."""
    missing, where = batch.results.count(None), routing.describe(batch.shard)
    what = f"{missing} of the {len(batch.results)} records" if batch.many else "the record"
    return UnavailableError(f"no replica of {where} took {what} {why}, nor will one: try again")


def torn(batch: Batch, routing: Routing) -> UnavailableError:
    """Return what to say about a call of which a recovery kept a later part, and lost another."""
    missing, total = batch.results.count(None), len(batch.results)
    return UnavailableError(
        f"when {routing.describe(batch.shard)} was recovered, it lost {missing} of the {total}"
        " records, and kept some that come later, so those that are missing cannot get their places"
        " any more: `results` has None for each; insert them anew, if they may be behind"
    )


def mark_parts(error: ZiplogError, batch: Batch) -> None:
    """Say in the error of a call of several records which are placed, and if it may be repeated."""
    error.results = batch.results
    if batch.is_stepwise:  # readers drop repetitions
        error.retriable |= isinstance(error, OutcomeUnknownError)
    else:  # some of it was done, so the whole must not simply be repeated
        error.retriable = error.retriable and not batch.is_begun


def unknown(doubt: Doubt, lanes: Mapping[int, Lane], routing: Routing) -> OutcomeUnknownError:
    """Return what to say about a call whose fate is not known in time."""
    unit = lanes[doubt.shard].unsettled.get(doubt.seq)
    heard = "its servers contradicted themselves"
    if unit is not None:
        heard = f"of {unit.replicas} replicas, {sorted(unit.acks)} acked"
    return doubt.error(routing.describe(doubt.shard), heard)
