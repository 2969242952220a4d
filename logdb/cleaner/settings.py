"""Settings and counters of a coordinator's cleaning rounds (docs/logdb.md, section 8)."""

from __future__ import annotations

import msgspec

from ziplog.core.units import NS_PER_MS


class RoundSettings(msgspec.Struct, frozen=True):
    """When a round is due, and how large its steps are."""

    #: Records after which a round is due; at least as many as there are keys.
    every_records: int = 100_000
    #: Dead bytes, beyond those that the last round left, after which a round is due.
    min_dead_bytes: int = 64 * 1024 * 1024
    #: Approximate size of a record that a round inserts, and the number of concurrent inserts.
    part_bytes: int = 256 * 1024
    inserts: int = 8
    #: Keys or records processed in one slice, and the pause after a slice.
    slice_keys: int = 500
    pause_ns: int = 2 * NS_PER_MS
    #: Timeout of one request to the log.
    request_timeout_ns: int = 30_000 * NS_PER_MS
    #: Time to wait for another coordinator's round, and the delay before a failed round is retried.
    other_round_timeout_ns: int = 60_000 * NS_PER_MS
    retry_ns: int = 10_000 * NS_PER_MS


class Counts(msgspec.Struct):
    """Counters of a coordinator's rounds."""

    #: Rounds completed, failed, and left to another coordinator.
    rounds: int = 0
    failed: int = 0
    left: int = 0
    #: Bytes of records with moved values, and of checkpoint parts.
    moved_bytes: int = 0
    checkpoint_bytes: int = 0
    #: Foreign records that were inserted again behind the cut.
    copied: int = 0
    #: The gsn of the last trim.
    trimmed: int = 0
    #: The error of the last failed round.
    reason: str = ""
