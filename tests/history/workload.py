"""A workload's processes: clients, subscribers, and the one that starts, kills and ends them.

Invariant: when a `Workload` is left, none of its processes runs any more, and its history says all
that the living ones did.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ziplog
from tests.history import events
from tests.history.clients import LogPlan, batches, connected, delivered, failed, run_client
from tests.history.events import now
from tests.history.payloads import number_of
from tests.history.processes import ClientProcesses, Stopped
from ziplog import RID_GENESIS, RID_RECENT, RecordId, TrimmedError, ZiplogError

if TYPE_CHECKING:
    from typing import Self

#: Interval between requests for reported losses, in seconds.
_LOSSES_S: Final = 1.0
_FETCH_S: Final = 0.25
_BATCH: Final = 5000
#: Mean number of batches between two restarts of a subscription.
_REOPEN: Final = 200
_RETRY_S: Final = 0.1
#: Time limit of the start of the clients, in seconds.
_START_S: Final = 30.0
#: Probability of a barrier before a batch, in a workload with appends.
_BARRIER: Final = 0.05
#: The history of a client that has done something.
_WORKING_BYTES: Final = 2000
#: Records that are read one by one at the end.
_SAMPLE: Final = 500


class Workload:
    """Processes that drive a cluster, from `with` on. For one thread."""

    def __init__(self, plan: LogPlan, clients: int, subscribers: int) -> None:
        """Prepare; the plan's directory is made."""
        self._plan: Final = plan
        Path(plan.directory).mkdir(parents=True, exist_ok=True)
        self._recorder: Final = plan.recorder("workload")
        self.clients: Final = ClientProcesses("client", run_client, plan)
        self._subscribers: Final = ClientProcesses("subscriber", run_subscriber, plan, first=0)
        self._counts: Final = (clients, subscribers)
        #: Processes that ended by an error of their own; known once all have ended.
        self.crashed: list[str] = []
        self._log: ziplog.Log | None = None
        self._losses: set[tuple[int, int, int]] = set()
        self._ask_at = 0.0

    def __enter__(self) -> Self:
        """Start all processes."""
        clients, subscribers = self._counts
        try:
            for _ in range(subscribers):
                self._subscribers.start()
            for _ in range(clients):
                self.clients.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        self.stop()

    def wait_working(self) -> None:
        """Wait until every client has begun to work.

        Raises:
            TimeoutError: one has not by then.
            RuntimeError: one has ended.

        """
        deadline = time.monotonic() + _START_S
        folder = Path(self._plan.directory)
        for number in self.clients.numbers:
            path = folder / f"client-{number}{events.SUFFIX}"
            while not path.exists() or path.stat().st_size < _WORKING_BYTES:
                if (code := self.clients.exit_code(number)) is not None:
                    raise RuntimeError(f"client {number} ended (exit code {code})")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"client {number} does not work after {_START_S:g} s")
                time.sleep(0.02)

    def note_losses(self) -> None:
        """Write what the cluster says is lost into the history. Asks at most once a second."""
        if time.monotonic() < self._ask_at:
            return
        self._ask_at = time.monotonic() + _LOSSES_S
        try:
            self._log = self._log or ziplog.connect(self._plan.bootstrap, timeout=1.0)
            losses = losses_of(self._log.cluster())
        except ZiplogError:
            return  # the next one will say it all
        if not losses <= self._losses:
            self._losses |= losses
            self._recorder.call(events.Losses(now(), sorted(self._losses)))

    def stop(self) -> None:
        """Ask all processes to end, wait for them, kill those that do not. Idempotent."""
        if self._recorder.is_closed:
            return
        self._subscribers.terminate()
        self.crashed = self.clients.stop() + self._subscribers.stop()
        if self._log is not None:
            self._log.close()
            self._log = None
        self._recorder.close()


def losses_of(status: dict[str, Any]) -> set[tuple[int, int, int]]:
    """Return the losses of a status document: (shard, start, stop)."""
    return {(loss["shard"], loss["start"], loss["stop"]) for loss in status.get("losses", ())}


# --- subscribers ---------------------------------------------------------------------------------


def run_subscriber(plan: LogPlan, number: int) -> None:
    """Follow the log until SIGTERM: from its beginning, from now on, or from its middle."""
    stopped = Stopped()
    with plan.recorder(f"subscriber-{number}") as recorder:
        log = connected(plan, stopped)
        if log is not None:
            try:
                _Subscriber(plan, number, log, recorder).run(stopped)
            finally:
                log.close()


class _Subscriber:
    def __init__(
        self, plan: LogPlan, number: int, log: ziplog.Log, recorder: events.Recorder
    ) -> None:
        self._number, self._log, self._recorder = number, log, recorder
        self._barriers = _BARRIER if plan.appends else 0.0
        self._random = random.Random(f"{plan.seed} subscriber {number}")

    def run(self, stopped: Stopped) -> None:
        start, resumes = self._first(stopped), 0
        while not stopped:
            op = self._recorder.next_op()
            self._recorder.call(
                events.Subscribe(op, now(), start.gsn, follow=True, resumes=resumes)
            )
            try:
                start, resumes = self._follow(op, start, stopped), op
            except TrimmedError as error:
                self._recorder.result(failed(op, error))
                start, resumes = error.first, 0
            except ZiplogError as error:
                self._recorder.result(failed(op, error))
                start, resumes = self._position, op
                time.sleep(_RETRY_S)
            if start.gsn < 0:  # it did not start: there is no position to resume from
                resumes = 0

    def _first(self, stopped: Stopped) -> RecordId:
        match self._number % 3:
            case 0:
                return RID_GENESIS
            case 1:
                return RID_RECENT
        while not stopped:
            try:
                tail = self._log.check_tail()
            except ZiplogError:
                time.sleep(_RETRY_S)
            else:
                return RecordId(tail.gsn // 2, 0)
        return RID_GENESIS

    def _follow(self, op: int, start: RecordId, stopped: Stopped) -> RecordId:
        """Follow for a while; return the position to resume from."""
        self._position = start
        with self._log.subscribe(start) as subscription:
            for _ in range(self._random.randrange(2 * _REOPEN)):
                if stopped:
                    break
                if self._barriers and self._random.random() < self._barriers:
                    self._barrier(op, subscription)
                records = subscription.fetch(_BATCH, timeout=_FETCH_S)
                if records:
                    self._recorder.result(delivered(op, records))
                self._position = subscription.position
        return self._position

    def _barrier(self, of: int, subscription: ziplog.Subscription) -> None:
        op = self._recorder.next_op()
        self._recorder.call(events.Barrier(op, now(), of))
        try:
            gsn = subscription.barrier().gsn
            self._recorder.result(events.Barred(op, now(), gsn))
        except ZiplogError as error:
            self._recorder.result(failed(op, error))


# --- at the end ----------------------------------------------------------------------------------


def read_all(plan: LogPlan, process: str = "final", timeout_s: float = 60.0) -> int:
    """Read the whole log with a fresh client, and some records one by one; return how many.

    Raises:
        ZiplogError: it cannot be read.

    """
    chooser = random.Random(f"{plan.seed} {process}")
    rids: list[RecordId] = []
    with (
        plan.recorder(process) as recorder,
        ziplog.connect(plan.bootstrap, timeout=timeout_s) as log,
    ):
        start = RID_GENESIS
        while True:
            op = recorder.next_op()
            recorder.call(events.Subscribe(op, now(), start.gsn, follow=False))
            try:
                with log.subscribe(start, follow=False) as subscription:
                    for batch in batches(subscription, _BATCH):
                        recorder.result(delivered(op, batch))
                        rids += [record.rid for record in batch]
                recorder.result(events.Ended(op, now()))
                break
            except TrimmedError as error:
                recorder.result(failed(op, error))
                start = error.first
        for rid in chooser.sample(rids, min(_SAMPLE, len(rids))):
            op = recorder.next_op()
            recorder.call(events.Read(op, now(), *rid))
            record = log.read_record(rid)
            recorder.result(events.Found(op, now(), number_of(record.payload)))
        _note_losses(log, recorder)
    return len(rids)


def _note_losses(log: ziplog.Log, recorder: events.Recorder) -> None:
    losses = losses_of(log.cluster())
    if losses:
        recorder.call(events.Losses(now(), sorted(losses)))
