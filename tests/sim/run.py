"""One run: executes a plan, and checks all guarantees.

Rule: every error propagates out of `run`; the seed and its faults reproduce it.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

import shard.recovery.state_transfer
import shard.state.session_tables
import shard.state.sessions
from mms import announcements
from tests.sim import verdict
from tests.sim.database.run import DatabaseRun
from tests.sim.owners import Ledger, Owner
from tests.sim.regions import REGIONS
from tests.sim.rows import RowWriter, once
from tests.sim.simulated import simulated
from tests.sim.speculators import Speculator
from tests.sim.stages import Outcome, Run
from tests.sim.workload import BARRIER, LastWriter, Reader, Writer
from tests.simulator.kernel import Kernel, S
from ziplog import wire
from ziplog.client.common.requests import ReadRequest
from ziplog.client.inserts import insert_calls
from ziplog.core import view
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.sim.plan import Plan
    from tests.sim.workload import Client

#: Number of records of finalized shards that are read at the end.
_READ_BACK: Final = 20
#: Maximum records of a unit: calls of few records are split into several units.
_UNIT_RECORDS: Final = 2
#: Bytes of a frame, in runs with a long lease history.
_SMALL_FRAME: Final = 128 * 1024


def run(
    plan: Plan,
    on_trace: Callable[[str], object] | None = None,
    directory: Path | None = None,
) -> Outcome:
    """Execute a plan.

    Args:
        plan: the plan.
        on_trace: receives every line of the trace.
        directory: where to write the history's files, in every case.

    Raises:
        AssertionError: a guarantee was violated; errors of servers and clients propagate, too.

    """
    kernel = Kernel(plan.seed, on_trace)
    small = patch.multiple(insert_calls, UNIT_RECORDS=_UNIT_RECORDS, ROW_UNIT_RECORDS=_UNIT_RECORDS)
    is_aged = any(fault.kind == "age" for fault in plan.faults)
    frames = small_frames() if is_aged else nullcontext()
    with simulated(kernel, is_raft_real=plan.is_raft_real), small, frames, _limits(plan):
        live = (LogRun if plan.database is None else DatabaseRun)(kernel, plan)
        try:
            return live.outcome()
        finally:
            if directory is not None:
                live.history.write(directory)


@contextmanager
def _limits(plan: Plan) -> Iterator[None]:
    """Apply the limits of a plan to the servers."""
    with ExitStack() as patched:
        for value, module, name in (
            (plan.sessions, shard.state.sessions, "MAX_SESSIONS"),
            (plan.table_bytes, shard.state.session_tables, "TABLE_BYTES"),
            (plan.part_bytes, shard.state.session_tables, "PART_BYTES"),
            (plan.part_bytes, shard.recovery.state_transfer, "_ANSWER_TABLE_BYTES"),
            (int(plan.publishes), announcements, "MANY_MEMBERS"),
        ):
            if value:
                patched.enter_context(patch.object(module, name, value))
        yield


@contextmanager
def small_frames() -> Iterator[None]:
    """Reduce the frame size, so that a lease history soon exceeds one frame."""
    with (
        patch.object(wire, "MAX_FRAME", _SMALL_FRAME),
        patch.object(view, "MAX_RUNS_BYTES", _SMALL_FRAME // 4),
    ):
        yield


class LogRun(Run):
    """A run with clients that insert, read and follow the log."""

    def __init__(self, kernel: Kernel, plan: Plan) -> None:
        super().__init__(kernel, plan)
        self.workers.extend(Writer(self.shared, f"writer-{i}", plan) for i in range(plan.writers))
        self.workers.extend(
            RowWriter(self.shared, f"rows-{i}", i, i % plan.shards) for i in range(plan.rows)
        )
        self.readers: Final[list[Reader]] = [
            Reader(
                self.shared,
                f"reader-{i}",
                shards=_shards_to_read(plan, i),
                known_rows=bool(plan.rows),
                barriers=BARRIER if plan.appends else 0.0,
            )
            for i in range(plan.readers)
        ]
        self.ledger: Final = Ledger()
        self.speculators: Final = [
            Speculator(self.shared, f"speculator-{i}", shards=_shards_to_read(plan, i))
            for i in range(plan.speculators)
        ]
        self.readers += self.speculators
        # A cursor is lost if several renewals in a row are.
        has_faults = bool(plan.faults) or plan.conditions.loss > 0
        self.owners: Final = [
            Owner(self.shared, f"owner-{i}", self.ledger, has_faults=has_faults)
            for i in range(plan.owners)
        ]
        self.onlookers.extend(self.readers)
        self.onlookers.extend(self.owners)
        #: They read the whole log at the end: in a plan with regions one in each, else one.
        self.auditors: Final = [
            Reader(self.shared, name, follow=False)
            for name in _in_each_region("auditor", plan) or ["auditor"]
        ]
        self.last_writers: Final = [
            LastWriter(self.shared, name) for name in _in_each_region("last", plan)
        ]
        #: The view of each shard when the clients start.
        self._first_views: dict[int, int] = {}

    def _prepare(self) -> None:
        """Note the views; there are only servers and clients."""
        self._first_views = self._views()

    def _views(self) -> dict[int, int]:
        return {shard: p.view for shard, p in self.cluster.state.placements.items()}

    def _judge(self, healed: int, records: int) -> Outcome:
        self.ledger.check()
        clients = [*self.workers, *self.onlookers, *self.last_writers, *self.auditors]
        was_searched = verdict.final(
            self.cluster, self.history, self.monitor, healed=healed,
            alive={client.name for client in clients if not client.is_lost},
        )  # fmt: skip
        return Outcome(
            self.kernel.trace_hash() + self.history.digest(),
            self.kernel.now / S, self.kernel.steps, len(self.history.operations),
            self.faults.done, records, was_searched,
        )  # fmt: skip

    def _open(self) -> list[object]:
        alive = {worker.name for worker in self.workers if not worker.is_lost}
        calls = [o for o in self.history.open.values() if o.client in alive]
        return [*self.operator.awaited, *calls]

    def _audit(self) -> int:
        """Read the whole log, let the readers catch up, and count the records."""
        self._insert_last()
        auditors = [auditor for auditor in self.auditors if self._is_there(auditor)]
        for auditor in auditors:
            auditor.start()
        done = self._pass_until(lambda: all(a.is_done for a in auditors), verdict.HEALED_NS)
        assert done, f"the log cannot be read to its end: {self.cluster.states()}"
        auditor = auditors[0]
        readers = [reader for reader in self.readers if not reader.is_lost]
        caught_up = self._pass_until(
            lambda: all(r.delivered.gsn >= self._last(r, auditor) for r in readers),
            verdict.HEALED_NS,
        )
        assert caught_up, [(r.name, r.delivered, auditor.delivered) for r in readers]
        speculators = [reader for reader in self.speculators if not reader.is_lost]
        settled = self._pass_until(
            lambda: not any(reader.promises.open for reader in speculators),
            verdict.HEALED_NS,
        )
        assert settled, f"W5: deliveries stay open: {[r.promises.open for r in speculators]}"
        failures = sum(reader.failures for reader in self.speculators)
        has_view_ended = self._views() != self._first_views
        assert has_view_ended or not failures, f"{failures} failures, and no view ended"
        last = auditor.delivered.gsn
        processed = self._pass_until(
            lambda: all(owner.is_lost for owner in self.owners) or self.ledger.is_processed(last),
            verdict.HEALED_NS,
        )
        assert processed, f"cursors stay behind {last}: {self.ledger.ends}"
        self._read_back(auditor)
        return auditor.records

    def _is_there(self, client: Client) -> bool:
        """Whether a client's region is not lost."""
        regions = self.plan.regions
        place = "" if regions is None else regions.of(client.process.name)
        return place not in self.cluster.lost_regions

    def _insert_last(self) -> None:
        """Insert a record from each region that is left, in as many regions as a shard spans.

        The shards that lost a server for good, and those that leave, take no records. Servers with
        few sessions may know too many clients already.
        """
        if self.plan.sessions:
            return
        spans = [
            len({replica.region for replica in placement.replicas})
            for shard, placement in self.cluster.state.placements.items()
            if placement.state == "live" and not self.cluster.has_lost_servers(shard)
        ]
        writers = [writer for writer in self.last_writers if self._is_there(writer)]
        for writer in writers:
            writer.min_regions = max(spans)
            writer.start()
        self._pass_until(lambda: all(writer.result for writer in writers), verdict.HEALED_NS)
        refused = [w for w in writers if not w.result or isinstance(w.result, BaseException)]
        assert not refused, [(w.name, w.min_regions, w.result) for w in refused]

    def _last(self, reader: Reader, auditor: Reader) -> int:
        """Return the last gsn that a reader must receive."""
        if reader.shards is None:
            return auditor.delivered.gsn
        rows = once(self.monitor.logs.records.values())
        gsns = [row.gsn for row in rows if row.shard in reader.shards]
        return max((gsn for gsn in gsns if gsn >= reader.first.gsn), default=0)

    def _read_back(self, auditor: Reader) -> None:
        """Read some records of finalized shards: they stay readable (the rules judge)."""
        left = {shard for shard, p in self.cluster.state.placements.items() if p.state != "live"}
        rows = [row for row in self.monitor.logs.records.values() if row.shard in left]
        chosen = self.kernel.random.sample(rows, min(len(rows), _READ_BACK))
        answers: list[object] = []
        for row in chosen:
            request = ReadRequest(auditor.deadline(60 * S), RecordId(row.gsn, row.shard))
            auditor.call(request, answers.append)
        is_done = self._pass_until(lambda: len(answers) == len(chosen), verdict.HEALED_NS)
        assert is_done, f"records of finalized shards cannot be read: {self.cluster.states()}"


def _in_each_region(name: str, plan: Plan) -> list[str]:
    """Return the names of clients of a kind, one in each region; none in a plan without regions."""
    return [f"{name}-{i}" for i in range(len(REGIONS))] if plan.regions is not None else []


def _shards_to_read(plan: Plan, reader: int) -> frozenset[int] | None:
    """Return the shards that a reader reads; None: all.

    In a third of the runs with several shards, the last reader reads one of them.
    """
    is_last = reader == plan.readers - 1
    if plan.shards == 1 or plan.seed % 3 or not is_last:
        return None
    return frozenset({plan.seed // 3 % plan.shards})
