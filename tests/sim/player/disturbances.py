"""Faults of players and targets, and an operator's changes, in a run.

Rule: what a fault does lasts for its time; `end` ends all of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from logplayer.contract import cursor_name
from tests.sim.player.files import SharedFiles
from tests.sim.player.process import (
    Outside,
    PlayerProgram,
    add_player,
    add_receiver,
    node_of,
)
from tests.sim.player.targets import Store
from tests.simulator.kernel import MS
from ziplog.types import RID_GENESIS, CursorInfo, RecordId

if TYPE_CHECKING:
    from collections.abc import Callable

    from logplayer.contract import TargetSpec
    from logplayer.settings import PlayerSettings
    from tests.sim.player.clients import Admin, Auditor
    from tests.sim.player.plan import PlayerFault
    from tests.simulator.process import Process
    from ziplog.core.cursors import Cursor

#: A killed process is started again after so long.
_RESTART_NS: Final = 200 * MS
#: Rates of skewed clocks.
_RATES: Final = (0.8, 0.9, 1.1, 1.25)


class Disturbances:
    """What disturbs the players of a run."""

    def __init__(
        self, outside: Outside, settings: PlayerSettings, admin: Admin, auditor: Auditor
    ) -> None:
        """Disturb nothing yet.

        Args:
            outside: the targets.
            settings: the player's.
            admin: the operator.
            auditor: has the log, also what is trimmed later.

        """
        self._outside: Final = outside
        self._cluster: Final = outside.cluster
        self._kernel: Final = outside.cluster.kernel
        self._settings: Final = settings
        self._admin: Final = admin
        self._auditor: Final = auditor
        self.processes: Final[list[Process]] = []
        self.receivers: Final[list[Process]] = []
        self._stopped: Final[set[Process]] = set()
        self._endings: Final[list[Callable[[], None]]] = []
        self.count = 0

    @property
    def names(self) -> list[str]:
        """The names of all tasks' cursors."""
        return [
            cursor_name(self._settings.name, spec.name, partition)
            for spec in self._settings.targets
            for partition in range(spec.partitions)
        ]

    def start(self) -> None:
        """Start the operator."""
        self._admin.start()

    def add_player(self) -> None:
        """Start one more process."""
        name = f"player-{len(self.processes)}"
        self.processes.append(add_player(self._outside, name, self._settings))

    def add_receiver(self, spec: TargetSpec) -> None:
        """Start the process of a receiver; `spec` has its target and its endpoint."""
        self.receivers.append(add_receiver(self._outside, spec.receiver, spec))

    def begin(self, fault: PlayerFault) -> None:
        """Do what a fault says."""
        self._kernel.trace(f"fault: {fault}")
        self.count += 1
        acts: dict[str, Callable[[PlayerFault], None]] = {
            "kill-player": self._kill, "pause-player": self._pause, "isolate-player": self._isolate,
            "skew-player": self._skew, "add-player": lambda _fault: self.add_player(),
            "stop-player": self._stop, "target-down": self._down, "target-slow": self._slow,
            "target-power": self._power, "target-empty": self._empty, "target-gone": self._empty,
            "target-older": self._put_back, "lead-mms": self._lead,
            "kill-receiver": self._kill_receiver, "pause-receiver": self._pause_receiver,
            "cut-receiver": self._cut_receiver,
            "kill-mms": self._kill_mms, "trim": self._trim, "trim-force": self._trim,
        }  # fmt: skip
        acts.get(fault.kind, self._edit)(fault)

    def end(self) -> None:
        """End all that lasts."""
        for ending in self._endings:
            ending()
        self._outside.unknown = self._outside.stalls = 0.0

    def _lasting(self, fault: PlayerFault, ending: Callable[[], None]) -> None:
        self._endings.append(ending)
        self._kernel.after(fault.for_ms * MS, ending)

    # --- processes ---

    def _process(self, fault: PlayerFault) -> Process:
        return self.processes[fault.number % len(self.processes)]

    def _kill(self, fault: PlayerFault) -> None:
        self._kill_process(self._process(fault))

    def _kill_process(self, process: Process) -> None:
        if process.is_up:
            process.kill()
            self._kernel.after(_RESTART_NS, partial(self._restart, process))

    def _restart(self, process: Process) -> None:
        if not process.is_up and process not in self._stopped:
            process.start()

    def _pause(self, fault: PlayerFault) -> None:
        process = self._process(fault)
        process.pause()
        self._lasting(fault, process.resume)

    def _skew(self, fault: PlayerFault) -> None:
        process, rates = self._process(fault), self._outside.rates
        rate = _RATES[fault.for_ms % len(_RATES)]
        rates[process.name] = min(rate, rates.get(process.name, 1.0))
        process.skew(rate)
        self._lasting(fault, partial(process.skew, 1.0))

    def _stop(self, fault: PlayerFault) -> None:
        """Stop a process for good, unless it is the last one."""
        process = self._process(fault)
        program = process.program
        if len(self._stopped) + 1 < len(self.processes) and isinstance(program, PlayerProgram):
            self._stopped.add(process)
            program.stop(partial(self._kernel.after, 0, partial(self._end_process, process)))

    def _end_process(self, process: Process) -> None:
        if process.is_up:
            process.kill()

    def _isolate(self, fault: PlayerFault) -> None:
        name, network = self._process(fault).name, self._cluster.network
        services = [node.name for node in self._cluster.config.mms]
        for service in services:
            network.cut(name, service)
            network.cut(service, name)
        self._outside.isolated.setdefault(name, self._kernel.now)

        def end() -> None:
            self._outside.isolated.pop(name, None)
            for service in services:
                network.heal(name, service)
                network.heal(service, name)

        self._lasting(fault, end)

    def _lead(self, fault: PlayerFault) -> None:
        group: Any = self._cluster.mms
        leader = group.leader
        if leader:
            group.isolate(leader)
            self._lasting(fault, partial(group.rejoin, leader))

    def _kill_mms(self, fault: PlayerFault) -> None:
        nodes = self._cluster.config.mms
        process = self._cluster.nodes[nodes[fault.number % len(nodes)].name]
        if process.is_up:
            process.kill()

    # --- receivers ---

    def _receiver(self, fault: PlayerFault) -> Process:
        return self.receivers[fault.number % len(self.receivers)]

    def _kill_receiver(self, fault: PlayerFault) -> None:
        process = self._receiver(fault)
        if process.is_up:
            process.kill()
            self._kernel.after(fault.for_ms * MS, partial(self._restart, process))

    def _pause_receiver(self, fault: PlayerFault) -> None:
        process = self._receiver(fault)
        if process.is_up:
            process.pause()
            self._lasting(fault, process.resume)

    def _cut_receiver(self, fault: PlayerFault) -> None:
        """Cut a receiver off, in one or in both directions."""
        receiver, player = self._receiver(fault).name, self._process(fault).name
        network, ways = self._cluster.network, [(receiver, player), (player, receiver)]
        cut = ways[: 1 + fault.number % 2]
        for way in cut:
            network.cut(*way)

        def end() -> None:
            for way in cut:
                network.heal(*way)

        self._lasting(fault, end)

    # --- targets ---

    def _target(self, fault: PlayerFault) -> str:
        return self._settings.targets[fault.number % len(self._settings.targets)].name

    def _down(self, fault: PlayerFault) -> None:
        name = self._target(fault)
        self._outside.down.add(name)
        self._lasting(fault, lambda: self._outside.down.discard(name))

    def _slow(self, fault: PlayerFault) -> None:
        name = self._target(fault)
        self._outside.slow.add(name)
        self._lasting(fault, lambda: self._outside.slow.discard(name))

    def _power(self, fault: PlayerFault) -> None:
        """Cut the power of a target; files are on the machine of the processes."""
        name = self._target(fault)
        target = self._outside.targets[name]
        if isinstance(target, Store):
            target.power_cut()
        elif isinstance(target, SharedFiles):
            for process in [*self.processes, *self.receivers]:
                self._kill_process(process)
            target.disk.power_cut()
        self._outside.oracle.power_cut(name)

    def _empty(self, fault: PlayerFault) -> None:
        name = self._target(fault)
        target, partitions = self._outside.targets[name], self._partitions(name)
        if isinstance(target, Store | SharedFiles):
            self._on_replaced(name)
            positions = (
                {partition: row.position for partition, row in target.rows.items()}
                if isinstance(target, Store)
                else {partition: target.position(partition) for partition in range(partitions)}
            )
            if isinstance(target, SharedFiles) and fault.kind == "target-gone":
                target.remove()
            for partition in range(partitions):
                target.drop(partition)
                cursor = self._cluster.state.cursors.get(
                    cursor_name(self._settings.name, name, partition)
                )
                if isinstance(target, SharedFiles) and cursor and not cursor.has_moved:
                    target.gaps.setdefault(partition, []).append((0, cursor.position))
            self._outside.oracle.lost_all(name, positions)

    def _put_back(self, fault: PlayerFault) -> None:
        """Put an older state of a store back, as from a copy of its database."""
        name = self._target(fault)
        target = self._outside.targets[name]
        if isinstance(target, Store):
            self._on_replaced(name)
            positions = {partition: row.position for partition, row in target.rows.items()}
            for partition, row in sorted(target.durable.items()):
                target.put_back(partition, self._kernel.random.randrange(len(row.effects) + 1))
            self._outside.oracle.put_back(name, positions)

    def _on_replaced(self, name: str) -> None:
        for partition in range(self._partitions(name)):
            task = cursor_name(self._settings.name, name, partition)
            self._outside.history.on_replaced(task)

    def _partitions(self, name: str) -> int:
        (spec,) = (spec for spec in self._settings.targets if spec.name == name)
        return spec.partitions

    # --- an operator's changes ---

    def _trim(self, fault: PlayerFault) -> None:
        """Trim before a record that was read; without force, mostly where no cursor holds it."""
        cursors = [self._cluster.state.cursors.get(name) for name in self.names]
        positions = [one.position for one in cursors if one is not None]
        read = [record.rid.gsn for record in self._auditor.records]
        if not read or not positions:
            return
        last = self._kernel.random.choice((read[-1], read[len(read) // 2], min(positions)))
        is_forced = fault.kind == "trim-force"
        self._outside.oracle.is_forced |= is_forced
        self._admin.trim(RecordId(min(last, read[-1]), 0), force=is_forced)

    def _edit(self, fault: PlayerFault) -> None:
        name, known = self.names[fault.number % len(self.names)], self._admin.shared.known
        position, random = RID_GENESIS, self._kernel.random
        if fault.kind == "seek":
            position = random.choice((RID_GENESIS, known[-1], known[len(known) // 2]))
        if fault.kind == "pause" and fault.number % 2:
            position = random.choice((known[-1], known[-1], known[len(known) // 2]))
        self._change(name, fault.kind, position)

    def _change(self, name: str, what: str, position: RecordId) -> None:
        oracle = self._outside.oracle
        oracle.edited(name)
        if what == "delete":
            oracle.deleted.add(name)
        if what == "seek":
            self._outside.history.on_seek(name)

        def done(info: CursorInfo | None) -> None:
            oracle.edited(name)
            if what == "seek" and info is not None:
                oracle.sought(name, info)
            if what == "delete":
                self._on_deleted(name)

        self._admin.edit(name, what, position, done)

    def _on_deleted(self, name: str) -> None:
        """Remove what a target keeps of a deleted cursor; note if there is nothing."""
        if self._drops_at_once(name):
            self._drop_former_row(name)
        _, target_name, partition = name.split("/")
        target = self._outside.targets[target_name]
        if isinstance(target, SharedFiles) and target.era(int(partition))[0] < 0:
            # It was emptied before, and the next cursor begins at the first record that is left.
            target.renewed.add(int(partition))

    def _drops_at_once(self, name: str) -> bool:
        """Whether what a target keeps is removed with its cursor, not once the next claim fails."""
        _, target, _ = name.split("/")
        is_of_files = isinstance(self._outside.targets[target], SharedFiles)
        return not is_of_files or self._kernel.random.random() < 0.5

    def _drop_former_row(self, name: str) -> bool:
        """Remove what a target keeps of a cursor that was deleted; return whether it did."""
        _, target_name, partition = name.split("/")
        target, cursor = self._outside.targets[target_name], self._cluster.state.cursors.get(name)
        if isinstance(target, SharedFiles):
            return self._drop_former_files(name, target, int(partition))
        row = target.rows.get(int(partition)) if isinstance(target, Store) else None
        if row is None or not isinstance(target, Store):
            return False
        if cursor is not None and cursor.birth == row.birth:
            return False
        (spec,) = (spec for spec in self._settings.targets if spec.name == target_name)
        self._outside.oracle.ended(spec, int(partition), row)
        target.drop(int(partition))
        return True

    def _drop_former_files(self, name: str, target: SharedFiles, partition: int) -> bool:
        """Empty the directory of a cursor that was deleted; return whether it did."""
        cursor, birth = self._cluster.state.cursors.get(name), target.era(partition)[0]
        if birth < 0 or (cursor is not None and cursor.birth == birth):
            return False
        self._outside.history.on_replaced(name)
        target.drop(partition)
        target.renewed.add(partition)
        return True

    def help_tasks(self) -> None:
        """Do what errors of players ask an operator for.

        Resume paused tasks, seek those whose targets were emptied, and create the cursors that were
        deleted while no process ran: processes stop for that.
        """
        for process in self.processes:
            node = node_of(process)
            for task in node.tasks.values() if node is not None else ():
                if task.state == "failed":
                    self._help(task.name)
        for name in self.names:
            cursor = self._cluster.state.cursors.get(name)
            if cursor is None:
                self._change(name, "create", RID_GENESIS)
            elif cursor.is_paused:
                self._change(name, "resume", RID_GENESIS)
        for process in self.processes:
            self._restart(process)

    def _help(self, name: str) -> None:
        _, target_name, partition = name.split("/")
        target, oracle = self._outside.targets[target_name], self._outside.oracle
        cursor = self._cluster.state.cursors.get(name)
        if self._drop_former_row(name):
            self._change(name, "resume", RID_GENESIS)
        elif cursor is not None and (
            oracle.may_lack_records(target_name) or self._is_refused(target, partition, cursor)
        ):
            position = target.position(int(partition)) if isinstance(target, SharedFiles) else 0
            self._change(name, "seek", RecordId(position, 0) if position else RID_GENESIS)

    @staticmethod
    def _is_refused(target: object, partition: str, cursor: Cursor) -> bool:
        """Whether a directory has records from the position on to which its cursor was sought."""
        return isinstance(target, SharedFiles) and target.era(int(partition))[1] < cursor.seek
