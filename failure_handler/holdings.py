"""The holdings of a stopped failure handler: `python -m failure_handler --holdings`.

Pure. See `ziplog.core.holdings`, and docs/protocol.md, section 16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziplog.core.holdings import HandlerHoldings, ShardRecovery

if TYPE_CHECKING:
    from failure_handler.state import HandlerState


def holdings(node: str, state: HandlerState, term: int, index: int) -> HandlerHoldings:
    """Return what a failure handler's log holds, which ends with this term and index."""
    return HandlerHoldings(
        node,
        term,
        index,
        [
            ShardRecovery(
                one.shard,
                one.view,
                one.attempt.base,
                is_under_way=one.is_under_way,
                is_finished=one.is_finished,
            )
            for one in state.shards.values()
        ],
    )
