"""The rules of the protocol that the model can switch off, and what each one buys."""

from __future__ import annotations

from typing import Final, NamedTuple


class Rule(NamedTuple):
    """One rule: who needs it, and where the project keeps it."""

    text: str
    #: The invariant that does not hold without it.
    invariant: str
    decisions: str
    module: str


RULES: Final[dict[str, Rule]] = {
    "no-reslot": Rule(
        "a backup gives a displaced record no other slot",
        "AckedStays", "D3, D4", "shard/state/guesses.py",
    ),
    "restart-is-failure": Rule(
        "a server that crashed does not go on in its view",
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
        "a subscriber is told only what is stable",
        "DelivAgree", "D43", "shard/serving/readers.py",
    ),
    "decided-only": Rule(
        "what is reported as held counts decided slots, not guesses",
        "StableAgree", "D7", "shard/state/decision_log.py",
    ),
    "two-copies": Rule(
        "a backup takes what it holds for stable, unasked, only if it is the only backup",
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
        "a server acks a record that it holds again, at the same slot",
        "NoDup", "D9", "shard/state/sessions.py",
    ),
    "gapless-stream": Rule(
        "a backup takes the primary's decisions without a gap",
        "NoHole", "D7, D44", "shard/ordering/backup.py",
    ),
    "token": Rule(
        "the primary goes on to the next epoch by deciding all that is left of this one",
        "NoHole", "D33, D44", "shard/ordering/primary.py",
    ),
    "closed-epoch": Rule(
        "a late record gets no position of a closed epoch",
        "DelivAgree", "D33", "shard/ordering/primary.py",
    ),
    "primary-noops": Rule(
        "only the primary makes no-ops",
        "StableAgree", "D6", "shard/ordering/primary.py",
    ),
    "announced-epochs": Rule(
        "recovery settles every epoch that was announced",
        "AckedStays", "D22, D32", "mms/recoveries.py",
    ),
    "noop-after-freeze": Rule(
        "no position of a silent shard becomes a no-op before a survivor is frozen",
        "DelivAgree", "D29", "failure_handler/recovery.py",
    ),
    "durable-decision": Rule(
        "a decision is in consensus before anybody hears of it",
        "ViewAgree", "D21, D28", "failure_handler/recovery.py",
    ),
    "no-way-back": Rule(
        "no recovery goes back behind a confirmed view",
        "DelivAgree", "D21", "failure_handler/state.py",
    ),
    "separate-recoveries": Rule(
        "who joined waits for its view to begin, a promise binds against lower numbers, and only"
        " who promised is the survivor",
        "DelivAgree", "D21, D28", "shard/recovery/participant.py",
    ),
    "confirm": Rule(
        "what is new in a view is told once f replicas hold it, and nobody goes back behind that",
        "DelivAgree", "D21, D43", "failure_handler/state.py",
    ),
    "least-frontier": Rule(
        "a subscriber hands out only what lies below every shard's frontier",
        "NoGap", "D44", "ziplog/client/reads/subscribe.py",
    ),
}  # fmt: skip
