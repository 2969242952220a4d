"""Clients that claim cursors, each in a process, and record what they learn (docs/history.md).

They share a few cursors: they claim one, read, commit, and release it, and seek sometimes.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import ziplog
from tests.history import events
from tests.history.clients import LogPlan, connected, failed
from tests.history.events import now
from tests.history.processes import Stopped
from ziplog import RID_GENESIS, ZiplogError

if TYPE_CHECKING:
    from tests.history.events import Recorder

_NAMES: Final = ("owners/a", "owners/b")
_LEASE_S: Final = 2.0
_FETCH_S: Final = 0.2
_RECORDS: Final = 100
#: Mean number of commits of a claim, and of claims between two seeks.
_COMMITS, _CLAIMS = 10, 10


def run_owner(plan: LogPlan, number: int) -> None:
    """Be owner `number` until SIGTERM."""
    stopped = Stopped()
    with plan.recorder(f"owner-{number}") as recorder:
        log = connected(plan, stopped)
        if log is not None:
            with log:
                source = random.Random(f"owner {plan.seed} {number}")  # noqa: S311 - no secret
                _Owner(log, recorder, source).run(stopped)


class _Owner:
    """Claims one cursor after the other."""

    def __init__(self, log: ziplog.Log, recorder: Recorder, source: random.Random) -> None:
        self._log: Final = log
        self._recorder: Final = recorder
        self._random: Final = source

    def run(self, stopped: Stopped) -> None:
        """Run until stopped."""
        while not stopped:
            op, name = self._recorder.next_op(), self._random.choice(_NAMES)
            self._recorder.call(events.Claim(op, now(), name))
            try:
                cursor = self._log.cursor(name, lease_s=_LEASE_S, timeout=3 * _LEASE_S)
            except ZiplogError as error:
                self._recorder.result(failed(op, error))
            else:
                self._use(cursor, op, stopped)
            if self._random.random() < 1 / _CLAIMS:
                self._seek(name)

    def _use(self, cursor: ziplog.Cursor, claim: int, stopped: Stopped) -> None:
        position, mark = cursor.position.gsn, cursor.mark.decode()
        try:
            with cursor:
                (info,) = self._log.cursors(cursor.name)
                if info.term != cursor.term:
                    return  # It is lost, so the number of seeks may be another one.
                numbers = (0, cursor.term, info.seek, position, mark)
                self._recorder.call(events.Claimed(claim, now(), *numbers))
                while not stopped and self._random.random() >= 1 / _COMMITS:
                    cursor.fetch(_RECORDS, timeout=_FETCH_S)
                    self._commit(cursor, claim)
        except ZiplogError:
            return  # The claim was lost, or its release was not answered.

    def _commit(self, cursor: ziplog.Cursor, claim: int) -> None:
        op, gsn = self._recorder.next_op(), cursor.reached.gsn
        self._recorder.call(events.Commit(op, now(), claim, gsn))
        try:
            found = cursor.commit(cursor.reached, b"%d" % gsn, timeout=2 * _LEASE_S)
        except ZiplogError as error:
            self._recorder.result(failed(op, error))
            raise
        self._recorder.result(events.Committed(op, now(), found.gsn))

    def _seek(self, name: str) -> None:
        op = self._recorder.next_op()
        self._recorder.call(events.SeekCursor(op, now(), name))
        try:
            self._log.seek_cursor(name, RID_GENESIS)
        except ZiplogError as error:
            self._recorder.result(failed(op, error))
        else:
            self._recorder.result(events.Sought(op, now()))
