"""Process that subscribes to the log from its beginning and checks the records.

It checks that gsns increase, and that every aircraft's events come in order without a gap or a
repeat. It also reports their number and the checksum of all payloads, for comparison with the
inserted ones.
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

#: Time without a record after which the check fails.
_TIMEOUT_S: Final = 60.0
_FETCH: Final = 4096
_decode: Final = msgspec.json.Decoder(Event).decode


class Judge:
    """Checks records in delivery order, and keeps the first fault."""

    def __init__(self) -> None:
        self.fault: str = ""
        self._records = 0
        self._checksum = 0
        self._legs: dict[str, int] = {}
        self._first: ziplog.RecordId | None = None
        self._last: ziplog.RecordId = ziplog.RID_GENESIS

    @property
    def records(self) -> int:
        """The number of records so far."""
        return self._records

    def check(self, records: Sequence[ziplog.Record]) -> None:
        """Check the next records."""
        legs = self._legs
        for record in records:
            if record.rid <= self._last:
                self._record_fault(f"{record.rid} came after {self._last}")
            self._last = record.rid
            self._first = self._first or record.rid
            event = _decode(record.payload)
            expected = legs.get(event.aircraft, 0) + 1
            if event.leg != expected:
                self._record_fault(f"{event.aircraft}: expected event {expected}, got {event.leg}")
            legs[event.aircraft] = event.leg
        self._records += len(records)
        self._checksum = checksum((record.payload for record in records), self._checksum)

    def verdict(self) -> Delivered:
        """Return the totals and the first fault."""
        return Delivered(
            records=self._records,
            checksum=self._checksum,
            aircraft=len(self._legs),
            first=str(self._first),
            last=str(self._last),
            fault=self.fault,
        )

    def _record_fault(self, fault: str) -> None:
        self.fault = self.fault or fault


def main() -> None:
    """Subscribe until the requested number of records has come."""
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
                records = subscription.fetch(_FETCH, timeout=_TIMEOUT_S)
                if not records:
                    sys.exit(f"subscriber: received no record for {_TIMEOUT_S:g} s")
                judge.check(records)
                reporter.progress(judge.records)
    except ziplog.ZiplogError as error:
        sys.exit(f"subscriber: {error}")
    reporter.result(judge.verdict())


if __name__ == "__main__":
    main()
