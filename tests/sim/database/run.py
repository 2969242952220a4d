"""A run with clients of a database, on coordinators that tail the log.

Every run is checked three times: coordinators against each other and the model, the clients'
operations against the model, and the history by `tests/history`.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final
from unittest.mock import patch

import logdb.client.known_states
import logdb.client.operations
import logdb.client.transaction
import logdb.coordinator.log_tailer
import logdb.coordinator.node
from logdb.cleaner.settings import RoundSettings
from logdb.decisions import Decisions
from logdb.log_usage import LogUsage
from logdb.state import State
from tests.sim import verdict
from tests.sim.database.deeds import Deeds
from tests.sim.database.judging import judge, judge_watch
from tests.sim.database.oracle import Oracle
from tests.sim.database.programs import add_coordinator, node_of
from tests.sim.database.workload import ACCOUNTS, BALANCE, PAGE, Auditor, Transactor, Watcher
from tests.sim.stages import Counts, Outcome, Run
from tests.simulator.kernel import MS, S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logdb.coordinator.node import CoordinatorNode
    from tests.sim.plan import Database, Plan
    from tests.simulator.kernel import Kernel

#: The last coordinator to start, from the rest of the log.
LATE: Final = "coordinator-9"


class DatabaseRun(Run):
    """The stages of such a run."""

    def __init__(self, kernel: Kernel, plan: Plan) -> None:
        super().__init__(kernel, plan)
        assert plan.database is not None
        self.database: Final = plan.database
        self.oracle: Final = Oracle(plan.database)
        self.deeds: Final = Deeds(kernel, self.history)
        shared, deeds, names = self.shared, self.deeds, plan.coordinators
        self.workers.extend(
            Transactor(shared, f"writer-{i}", deeds, names, plan) for i in range(plan.writers)
        )
        self.watchers: Final = [
            Watcher(shared, f"reader-{i}", deeds, names) for i in range(plan.readers)
        ]
        self.onlookers.extend(self.watchers)
        self.auditor: Final = Auditor(shared, "auditor", deeds, LATE)

    def outcome(self) -> Outcome:
        with small(self.database), self.oracle.observing():
            return super().outcome()

    def check_servers(self) -> None:
        super().check_servers()
        self.oracle.check_trim(self.cluster.state.trim)
        for name in self._coordinators():
            node = self._node(name)
            if node is not None:
                self.oracle.check_places(node.tailer.state)

    def _prepare(self) -> None:
        """Start the coordinators, and open the bank."""
        for name in self.plan.coordinators:
            add_coordinator(self.cluster, name, self.database)
        opening = self.deeds.begin("bank", 0, "opening")
        opening.steps.append(("accounts", "", [BALANCE] * len(ACCOUNTS)))
        self.deeds.committed(opening)

    def _open(self) -> list[object]:
        alive = {worker.name for worker in self.workers}
        deeds = [deed for deed in self.deeds.open if deed.client in alive]
        late = [name for name in self._coordinators() if self._is_behind(name)]
        return [*self.operator.open, *deeds, *late]

    def _coordinators(self) -> list[str]:
        """Return the names of those that were started."""
        return [name for name in (*self.plan.coordinators, LATE) if name in self.cluster.nodes]

    def _node(self, name: str) -> CoordinatorNode | None:
        return node_of(self.cluster.nodes[name])

    def _is_behind(self, name: str) -> bool:
        """Whether a coordinator has not reached the position of the others."""
        node, model = self._node(name), self.oracle.model
        if node is None or not node.is_ready:
            return True
        return bool(model.records) and node.tailer.state.position != model.records[-1].rid

    def _audit(self) -> int:
        """Read the whole database from a coordinator that starts at the end."""
        add_coordinator(self.cluster, LATE, self.database, checkpoints=False)
        auditor = self.auditor
        auditor.start()
        is_done = self._pass_until(lambda: auditor.rows is not None, verdict.HEALED_NS)
        assert is_done, f"the database cannot be read: {self._states()}"
        is_done = self._pass_until(lambda: not self._open(), verdict.HEALED_NS)
        assert is_done, f"coordinators are behind: {self._open()}"
        self._pass_until(self._has_seen_all, verdict.HEALED_NS)
        return len(self.oracle.model.records)

    def _states(self) -> str:
        rows = [self.cluster.states()]
        for name in self._coordinators():
            node = self._node(name)
            if node is not None:
                tailer = node.tailer
                rows.append(
                    f"{name}: ready={tailer.is_ready} at {tailer.state.position}, passed"
                    f" {tailer.passed}, {len(node.pending)} wait"
                )
        return "; ".join(rows)

    def _has_seen_all(self) -> bool:
        """Whether every watcher received the last state of its key."""
        entries = self.oracle.model.entries
        for watcher in self.watchers:
            if not watcher.seen:
                return False
            key, states = watcher.seen[-1]
            held = entries.get(key)
            if not states or states[-1].version != (held.version if held else 0):
                return False
        return True

    def _judge(self, healed: int, records: int) -> Outcome:  # noqa: ARG002 - all calls have ended
        self.monitor.check_end()
        self.deeds.close()
        self.oracle.check_log({row.gsn: row.payload for row in self.monitor.logs.records.values()})
        assert not self.monitor.losses, f"lost: {self.monitor.losses}"
        if self.database.has_model:
            self._judge_by_model()
        self.history.check()
        deeds = self.deeds.all
        outcomes = [deed.outcome for deed in deeds]
        counts = Counts(
            outcomes.count("committed"), outcomes.count("aborted"), outcomes.count("in doubt"),
            len(self.oracle.model.done), self.oracle.trims,
        )  # fmt: skip
        return Outcome(
            self.kernel.trace_hash() + self.history.digest(),
            self.kernel.now / S, self.kernel.steps, len(deeds), self.faults.done, records,
            was_searched=False, database=counts,
        )  # fmt: skip

    def _judge_by_model(self) -> None:
        model = self.oracle.model
        judge(model, self.deeds.all)
        rows = {
            key: held.value
            for key in model.changes
            if (held := model.at(key, self.auditor.gsn)) is not None
        }
        assert self.auditor.rows == rows, (
            f"the database holds {self.auditor.rows}, and by its log {rows}"
        )
        for watcher in self.watchers:
            for key, states in watcher.seen:
                judge_watch(model, key, states)
        assert self._has_seen_all(), "a watcher was not given the last state of its key: " + str(
            [(watcher.seen[-1][0], watcher.seen[-1][1][-1:]) for watcher in self.watchers]
        )


@contextmanager
def small(database: Database) -> Iterator[None]:
    """Apply the small sizes of a plan to the database, inside a `with` block."""

    def state() -> State:
        segments = LogUsage(database.segment_bytes, database.segment_bytes)
        return State(decisions=Decisions(database.decisions), log_usage=segments)

    rounds = partial(
        RoundSettings, min_dead_bytes=database.segment_bytes, part_bytes=400, inserts=2,
        slice_keys=7, request_timeout_ns=10 * S, other_round_timeout_ns=2 * S, retry_ns=300 * MS,
    )  # fmt: skip
    with (
        patch.object(logdb.coordinator.log_tailer, "State", state),
        patch.object(logdb.coordinator.node, "RoundSettings", rounds),
        patch.object(logdb.client.operations, "INLINE_BYTES", database.inline_bytes),
        patch.object(logdb.client.known_states, "QUIET_REPLIES", database.quiet_replies),
        patch.object(logdb.client.known_states, "FRESH_NS", database.known_ms * MS),
        patch.object(logdb.client.transaction, "PAGE_ROWS", PAGE),
    ):
        yield
