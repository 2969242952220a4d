"""Clients inside regions, each in a process of its own, with a history.

A process' number says its region: hundreds count the regions.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from wan import namespaces

from tests.history import events
from tests.history.clients import LogPlan, connected, delivered, failed, run_client
from tests.history.events import now
from tests.history.payloads import PER_CLIENT, payload
from tests.history.processes import Stopped
from ziplog import RID_GENESIS, ZiplogError

if TYPE_CHECKING:
    import ziplog

#: The first number of each kind of process.
CLIENTS, WRITERS, READERS = 0, 1000, 2000
_PER_REGION: Final = 100
_BATCH: Final = 5000
_FETCH_S: Final = 0.25
_RETRY_S: Final = 0.1
#: Time between two inserts of a writer.
_PAUSE_S: Final = 0.02


class RegionPlan(LogPlan, frozen=True, kw_only=True):
    """Settings of all processes of a trial."""

    #: The router's process id.
    router: int
    #: The regions, in the order of their numbers.
    regions: list[str]
    #: Regions in which a record must be before a writer's insert returns.
    min_regions: int
    #: Whether the writers request that; otherwise, they only record it.
    requests_regions: bool = True


def first_number(kind: int, region: int) -> int:
    """Return the number of the first process of a kind in a region, by the region's number."""
    return kind + _PER_REGION * region + 1


def region_of(number: int) -> int:
    """Return the number of the region of a process."""
    return number % WRITERS // _PER_REGION


def _enter(plan: RegionPlan, number: int) -> None:
    """Move this process into its region; its clients know the region by the environment."""
    region = region_of(number)
    namespaces.enter(plan.router, region)
    os.environ["ZIPLOG_REGION"] = plan.regions[region]


def run_mixed(plan: RegionPlan, number: int) -> None:
    """Insert, read and ask, in the region."""
    _enter(plan, number)
    run_client(plan, number)


def run_writer(plan: RegionPlan, number: int) -> None:
    """Insert one record after the other, in the region."""
    _enter(plan, number)
    stopped, payloads = Stopped(), number * PER_CLIENT
    requested = plan.min_regions if plan.requests_regions else None
    with plan.recorder(f"writer-{number}") as recorder:
        log = connected(plan, stopped)
        while log is not None and not stopped:
            payloads += 1
            op = recorder.next_op()
            recorder.call(events.Insert(op, now(), 0, [payloads], min_regions=plan.min_regions))
            try:
                rid = log.insert_after(payload(payloads, plan.payload_bytes), min_regions=requested)
            except ZiplogError as error:
                recorder.result(failed(op, error))
            else:
                recorder.result(events.Inserted(op, now(), [rid.gsn], [rid.shard]))
            time.sleep(_PAUSE_S)
        if log is not None:
            log.close()


def run_reader(plan: RegionPlan, number: int) -> None:
    """Follow the log from its beginning, in the region."""
    _enter(plan, number)
    stopped = Stopped()
    with plan.recorder(f"reader-{number}") as recorder:
        log = connected(plan, stopped)
        if log is not None:
            with log:
                _Reader(log, recorder).run(stopped)


class _Reader:
    def __init__(self, log: ziplog.Log, recorder: events.Recorder) -> None:
        self._log: Final = log
        self._recorder: Final = recorder
        self._position = RID_GENESIS

    def run(self, stopped: Stopped) -> None:
        """Follow; after an error continue from the position."""
        recorder, resumes = self._recorder, 0
        while not stopped:
            op, start = recorder.next_op(), self._position.gsn
            recorder.call(events.Subscribe(op, now(), start, follow=True, resumes=resumes))
            try:
                self._follow(op, stopped)
            except ZiplogError as error:
                recorder.result(failed(op, error))
                time.sleep(_RETRY_S)
            resumes = op

    def _follow(self, op: int, stopped: Stopped) -> None:
        with self._log.subscribe(self._position) as subscription:
            while not stopped:
                records = subscription.fetch(_BATCH, timeout=_FETCH_S)
                if records:
                    self._recorder.result(delivered(op, records))
                    self._recorder.flush()
                self._position = subscription.position
