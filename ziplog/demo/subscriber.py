"""A process that follows the log from its beginning and judges what it gets.

Every gsn above the one before, every aircraft's events in their order without a gap or a repeat;
how many, and the checksum of all payloads, for comparison with what was inserted.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

import msgspec

import ziplog
from ziplog.demo.flights import Event
from ziplog.demo.parts import Delivered, Reporter, checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Without a record for so long, something is wrong.
_PATIENCE_S: Final = 60.0
_FETCH: Final = 4096
_decode: Final = msgspec.json.Decoder(Event).decode


class Judge:
    """Takes records in the order of delivery and remembers the first fault."""

    def __init__(self) -> None:
        self.fault: str = ""
        self._records = 0
        self._checksum = 0
        self._legs: dict[str, int] = {}
        self._first: ziplog.RecordId | None = None
        self._last: ziplog.RecordId = ziplog.RID_GENESIS

    @property
    def records(self) -> int:
        """How many came."""
        return self._records

    def take(self, records: Sequence[ziplog.Record]) -> None:
        """Judge the next records."""
        legs = self._legs
        for record in records:
            if record.rid <= self._last:
                self._blame(f"{record.rid} came after {self._last}")
            self._last = record.rid
            self._first = self._first or record.rid
            event = _decode(record.payload)
            expected = legs.get(event.aircraft, 0) + 1
            if event.leg != expected:
                self._blame(f"{event.aircraft}: event {event.leg} came instead of {expected}")
            legs[event.aircraft] = event.leg
        self._records += len(records)
        self._checksum = checksum((record.payload for record in records), self._checksum)

    def verdict(self) -> Delivered:
        """Return what came and the first fault."""
        return Delivered(
            records=self._records,
            checksum=self._checksum,
            aircraft=len(self._legs),
            first=str(self._first),
            last=str(self._last),
            fault=self.fault,
        )

    def _blame(self, fault: str) -> None:
        self.fault = self.fault or fault


def main() -> None:
    """Follow until as many records came as the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--records", type=int, required=True)
    arguments = parser.parse_args()
    reporter, judge = Reporter(), Judge()
    try:
        with (
            ziplog.connect(arguments.bootstrap) as log,
            log.subscribe(ziplog.RID_GENESIS) as subscription,
        ):
            while judge.records < arguments.records and not judge.fault:
                records = subscription.fetch(_FETCH, timeout=_PATIENCE_S)
                if not records:
                    sys.exit(f"subscriber: nothing came for {_PATIENCE_S:g} s")
                judge.take(records)
                reporter.progress(judge.records)
    except ziplog.ZiplogError as error:
        sys.exit(f"subscriber: {error}")
    reporter.result(judge.verdict())


if __name__ == "__main__":
    main()
