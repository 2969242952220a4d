"""What a Raft follower takes of an `append_entries`: what it does not hold, and no more than that.

Rule (Raft, section 5.3): entries are deleted only if one that came contradicts them, and nothing
behind the last entry of a message counts as committed by it.
"""

from __future__ import annotations

from typing import Any


def news(own: list[Any], message: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return an `append_entries` without the entries that are held already.

    `own` are the entries held from `prevLogIdx` on, as (command, index, term). The second result is
    whether what is held behind the message's entries stays: it does unless one contradicts it
    (Raft, section 5.3). Nothing behind them counts as committed by this message.
    """
    entries = message.get("entries", [])
    if not own or own[0][2] != message["prevLogTerm"]:
        return message, False
    known = 0
    for ours, theirs in zip(own[1:], entries, strict=False):
        if ours[2] != theirs[2]:
            break
        known += 1
    verified = message["prevLogIdx"] + len(entries)
    rest = message | {
        "prevLogIdx": message["prevLogIdx"] + known,
        "prevLogTerm": own[known][2],
        "entries": entries[known:],
        "commit_index": min(message["commit_index"], verified),
    }
    return rest, not rest["entries"]
