"""Rules of a player's task that the model can switch off, with the invariant that needs each."""

from __future__ import annotations

from typing import Final, NamedTuple


class Rule(NamedTuple):
    """One rule, with its invariant and the module that implements it."""

    text: str
    #: The invariant that fails without it.
    invariant: str
    module: str


RULES: Final[dict[str, Rule]] = {
    "one-transaction": Rule(
        "a target stores the position with the effect, in one atomic step",
        "ExactlyOnce", "logplayer/targets/sql.py",
    ),
    "compare-start": Rule(
        "a target refuses a batch that does not begin at its position",
        "ExactlyOnce", "logplayer/targets/tables.py",
    ),
    "compare-term": Rule(
        "a target refuses a batch of another term than it stores",
        "Fence", "logplayer/targets/tables.py",
    ),
    "open-stores-term": Rule(
        "a target that is opened stores the term of the claim",
        "Fence", "logplayer/targets/tables.py",
    ),
    "open-again": Rule(
        "after a step of unknown outcome the target is opened before anything else",
        "CursorBehind", "logplayer/task.py",
    ),
    "effect-first": Rule(
        "the cursor moves only to what is at the target",
        "CursorBehind", "logplayer/task.py",
    ),
    "move-in-term": Rule(
        "a cursor moves only in the term of its last claim",
        "CursorBehind", "mms/cursor_table.py",
    ),
    "terms-grow": Rule(
        "each claim has a term of its own",
        "OneOwner", "mms/cursor_table.py",
    ),
    "count-seeks": Rule(
        "a target begins at the sought position, once for each seek",
        "ExactlyOnce", "logplayer/targets/tables.py",
    ),
    "empty-is-lost": Rule(
        "a target without a position is not filled if its cursor has moved",
        "ExactlyOnce", "logplayer/targets/sql.py",
    ),
    "hold": Rule(
        "a trim does not pass a cursor that holds",
        "Held", "mms/trims.py",
    ),
}  # fmt: skip
