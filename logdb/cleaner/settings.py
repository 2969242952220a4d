"""Settings and counters of a coordinator's cleaning rounds (docs/logdb.md, section 8)."""

from __future__ import annotations

from typing import Final

import msgspec

_MS: Final = 1_000_000


class RoundSettings(msgspec.Struct, frozen=True):
    """When a round is due, and in what steps it goes."""

    #: Records after which a round is due; as many as there are keys if that is more.
    every_records: int = 100_000
    #: Or so many bytes that are dead, beside those that the last round left.
    min_dead_bytes: int = 64 * 1024 * 1024
    #: About so large are the records that a round inserts, and so many are under way.
    part_bytes: int = 256 * 1024
    inserts: int = 8
    #: Keys or records that are looked at in one step, and the pause after it.
    slice_keys: int = 500
    pause_ns: int = 2 * _MS
    #: The log may take so long for one request.
    request_timeout_ns: int = 30_000 * _MS
    #: Another's round is waited for so long, and a round that failed is tried again after so long.
    other_round_timeout_ns: int = 60_000 * _MS
    retry_ns: int = 10_000 * _MS


class Counts(msgspec.Struct):
    """What a coordinator's rounds did."""

    #: Rounds that were completed; given up for a failure; left to another coordinator.
    rounds: int = 0
    failed: int = 0
    left: int = 0
    #: Bytes of records with moved values, and with parts of checkpoints.
    moved_bytes: int = 0
    checkpoint_bytes: int = 0
    #: Where the log was trimmed last.
    trimmed: int = 0
    #: Why the last round that failed did.
    reason: str = ""
