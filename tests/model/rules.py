"""Rules of the protocol that the model can switch off, with the invariant that needs each."""

from __future__ import annotations

from typing import Final, NamedTuple


class Rule(NamedTuple):
    """One rule, with its invariant, decisions and module."""

    text: str
    #: The invariant that fails without it.
    invariant: str
    decisions: str
    module: str


RULES: Final[dict[str, Rule]] = {
    "no-reslot": Rule(
        "a backup gives a displaced record no other slot",
        "AckedStays", "D3, D4", "shard/state/guesses.py",
    ),
    "restart-is-failure": Rule(
        "a crashed server does not continue in its view",
        "AckedStays", "D2", "shard/recovery/checkpoint.py",
    ),
    "roll-forward-guesses": Rule(
        "recovery keeps what the survivor guessed and acked, not only what was decided",
        "AckedStays", "D22", "shard/recovery/participant.py",
    ),
    "freeze": Rule(
        "the survivor stores nothing more before its state is taken",
        "AckedStays", "D20", "shard/recovery/participant.py",
    ),
    "views": Rule(
        "acks and forwards carry their view, and views are never mixed",
        "AckedStays", "D1", "shard/replica.py",
    ),
    "stable-reads": Rule(
        "a subscriber receives only stable records",
        "DelivAgree", "D43", "shard/serving/readers.py",
    ),
    "decided-only": Rule(
        "a backup's report counts decided slots, not guesses",
        "StableAgree", "D7", "shard/state/decision_log.py",
    ),
    "two-copies": Rule(
        "a backup treats its applied entries as stable only if it is the only backup",
        "DelivAgree", "D7, D43", "shard/ordering/backup.py",
    ),
    "one-decision": Rule(
        "a recovery has one decision",
        "ViewAgree", "D21", "failure_handler/state.py",
    ),
    "remove-copies": Rule(
        "a backup drops its guess of a record that the primary placed elsewhere",
        "NoDup", "D9, D22", "shard/state/guesses.py",
    ),
    "recognise": Rule(
        "a server acks a copy of a record at the record's slot",
        "NoDup", "D9", "shard/state/sessions.py",
    ),
    "gapless-stream": Rule(
        "a backup applies the primary's decisions without a gap",
        "NoHole", "D7, D44", "shard/ordering/backup.py",
    ),
    "token": Rule(
        "the primary decides the rest of an epoch before it enters the next one",
        "NoHole", "D33, D44", "shard/ordering/primary.py",
    ),
    "closed-epoch": Rule(
        "a late record receives no position of a closed epoch",
        "DelivAgree", "D33", "shard/ordering/primary.py",
    ),
    "primary-noops": Rule(
        "only the primary makes no-ops",
        "StableAgree", "D6", "shard/ordering/primary.py",
    ),
    "announced-epochs": Rule(
        "recovery decides every announced epoch",
        "AckedStays", "D22, D32", "mms/recoveries.py",
    ),
    "noop-after-freeze": Rule(
        "no position of a silent shard becomes a no-op before a survivor is frozen",
        "DelivAgree", "D29", "failure_handler/recovery.py",
    ),
    "durable-decision": Rule(
        "a decision is committed before it is sent",
        "ViewAgree", "D21, D28", "failure_handler/recovery.py",
    ),
    "no-way-back": Rule(
        "no recovery starts before a confirmed view",
        "DelivAgree", "D21", "failure_handler/state.py",
    ),
    "separate-recoveries": Rule(
        "a joined server waits for the start of its view, a promise excludes lower numbers, and"
        " only a server that promised is the survivor",
        "DelivAgree", "D21, D28", "shard/recovery/participant.py",
    ),
    "confirm": Rule(
        "new entries of a view are served once f replicas hold them, and no recovery drops them",
        "DelivAgree", "D21, D43", "failure_handler/state.py",
    ),
    "least-frontier": Rule(
        "a subscriber delivers only records below every shard's frontier",
        "NoGap", "D44", "ziplog/client/reads/subscribe.py",
    ),
    "told-decided": Rule(
        "an append waits for positions that are stable, not only decided",
        "LaterAbove", "17.2", "shard/serving/readers.py",
    ),
    "told-members": Rule(
        "an append waits for shards that are in no new lease, too",
        "LaterAbove", "17.2", "ziplog/client/seals/settled_prefix.py",
    ),
    "told-frozen": Rule(
        "an append waits until a view is decided, not only for a frozen survivor",
        "LaterAbove", "17.2", "shard/serving/readers.py",
    ),
    "told-guess": Rule(
        "an append does not count what a backup guessed",
        "LaterAbove", "17.2", "shard/serving/readers.py",
    ),
}  # fmt: skip
