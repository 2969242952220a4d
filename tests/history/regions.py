"""Rule on regions: an acknowledged record is in as many regions as its insert requested.

A record is acknowledged by all servers of its shard, in one view. Rule: of all placements of the
views that were in force between the call and the acknowledgement, one spans the number of regions.
So a client may know the former regions of a view. A history without placements of a shard says
nothing about it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from tests.history.violation import Violation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.history.rules import Judgement


def check(judgement: Judgement) -> Iterator[Violation]:
    """Check all acknowledged records whose inserts requested a number of regions."""
    records = judgement.observed.records
    spans = {shard: sorted(rows) for shard, rows in judgement.observed.spans.items()}
    for index, gsn in enumerate(records.gsn if spans else ()):
        required, shard = records.min_regions[index], records.shard[index]
        if not gsn or not required or shard not in spans:
            continue
        widest = _widest(spans[shard], records.called[index], records.acked[index])
        if widest < required:
            payload, source = records.payload[index], records.source[index]
            text = (
                f"payload {payload} is at {gsn}@{shard}, which spanned {widest} regions from its"
                f" call to its acknowledgement, and {required} were requested"
            )
            yield Violation("regions", text, source, gsn, payload)


def _widest(spans: Sequence[tuple[int, int, int]], called: int, acked: int) -> int:
    """Return the most regions that a shard spanned in the views of [called, acked]."""
    first = max(bisect_right(spans, called, key=lambda row: row[0]) - 1, 0)
    stop = max(bisect_right(spans, acked, key=lambda row: row[0]), 1)
    views = {view for _, view, _ in spans[first:stop]}
    return max(count for _, view, count in spans[:stop] if view in views)
