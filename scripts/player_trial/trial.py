"""One trial: a cluster, a workload, processes of one player, its targets, and their faults."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Final

from fault_injection.trial import untried

from player_trial.copies import (
    EndpointCopy,
    FunctionCopy,
    PostgresCopy,
    PushCopy,
    SqliteCopy,
    judge,
    recorded,
)
from player_trial.owners import run_owner
from tests import postgres
from tests.history import events, rules
from tests.history.clients import LogPlan
from tests.history.events import now
from tests.history.observed import gather
from tests.history.processes import ClientProcesses
from ziplog.deploy.new_shard import free_ports
from ziplog.errors import OutcomeUnknownError, TrimHeldError, UnavailableError, ZiplogError
from ziplog.local import Cluster
from ziplog.runtime.child_processes import environment
from ziplog.types import RecordId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Self

    import ziplog
    from player_trial.copies import Copy
    from ziplog.types import CursorInfo

_LEASE_S: Final = 2
_SHARDS: Final = 2
_MEMBERSHIP_NODES: Final = 3
_KEYS: Final = 20
_OWNERS: Final = 2
_STOP_S: Final = 60.0
#: Time to deliver everything once the faults have ended.
_DRAIN_S: Final = 120.0


class Workload:
    """A thread that inserts, until it is stopped."""

    def __init__(self, log: ziplog.Log, seed: int) -> None:
        self._log: Final = log
        self._random: Final = random.Random(f"workload {seed}")  # noqa: S311 - no secret
        #: The payload at each position, and those of inserts of unknown outcome.
        self.placed: Final[dict[int, str]] = {}
        self.possible: Final[set[str]] = set()
        self._stop: Final = threading.Event()
        self._thread: Final = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(0.02):
            count = self._random.randint(1, 50)
            keys = [f"key-{self._random.randrange(_KEYS)}" for _ in range(count)]
            payloads = [f"{key} {number + index}" for index, key in enumerate(keys)]
            number += count
            encoded = [payload.encode() for payload in payloads]
            rids: Sequence[RecordId | None]
            try:
                rids = self._log.insert_many(encoded, keys=[key.encode() for key in keys])
            except (OutcomeUnknownError, UnavailableError) as error:
                rids = error.results or [None] * count
                if isinstance(error, OutcomeUnknownError):
                    self.possible.update(payloads)
            for rid, payload in zip(rids, payloads, strict=True):
                if rid is not None:
                    self.placed[rid.gsn] = payload
                    self.possible.discard(payload)

    def stop(self) -> None:
        """Stop it, and wait for its last insert."""
        self._stop.set()
        self._thread.join()

    @property
    def has_ended(self) -> bool:
        """Whether it ended by an error, before it was stopped."""
        return not self._thread.is_alive() and not self._stop.is_set()


class Trial:
    """A context manager: everything runs inside, and nothing outside."""

    def __init__(
        self, directory: Path, seed: int, processes: int, partitions: int, *, is_broken: bool
    ) -> None:
        self._directory: Final = directory
        self._history: Final = directory / "history"
        self._seed: Final = seed
        self._partitions: Final = partitions
        self._is_broken: Final = is_broken
        self._processes: Final[list[subprocess.Popen[bytes] | None]] = [None] * processes
        self._random: Final = random.Random(f"faults {seed}")  # noqa: S311 - no secret
        self._stack: Final = contextlib.ExitStack()
        self.copies: Final[list[Copy]] = []
        self._injected = 0

    def __enter__(self) -> Self:
        """Start everything."""
        with contextlib.ExitStack() as stack:
            self._cluster = stack.enter_context(
                Cluster(self._directory / "log", shards=_SHARDS, mms=_MEMBERSHIP_NODES)
            )
            self._log = stack.enter_context(self._cluster.connect(timeout=60.0))
            self._history.mkdir()
            plan = LogPlan(
                directory=str(self._history), mix={}, seed=self._seed,
                bootstrap=",".join(self._log.endpoints),
            )  # fmt: skip
            self._recorder = stack.enter_context(plan.recorder("trial"))
            self._owners = ClientProcesses("owner", run_owner, plan)
            stack.callback(self._owners.stop)
            self._add(stack, SqliteCopy(self._directory, self._partitions))
            self._add(stack, FunctionCopy(self._directory, self._partitions))
            ports = free_ports(2, "127.0.0.1")
            self._add(stack, EndpointCopy(self._directory, next(ports)))
            self._add(stack, PushCopy(self._directory, self._history, next(ports), self._seed))
            if not postgres.why_not():
                self._add(stack, PostgresCopy(self._partitions))
            self._write_file()
            stack.callback(self._kill_processes)
            for index in range(len(self._processes)):
                self._start(index)
            self._wait_for_tasks()
            for _ in range(_OWNERS):
                self._owners.start()
            self._workload = Workload(self._log, self._seed)
            stack.callback(self._workload.stop)
            self._stack.push(stack.pop_all())
        return self

    def __exit__(self, *_: object) -> None:
        """Stop everything."""
        self._stack.close()

    def _add(self, stack: contextlib.ExitStack, copy: Copy) -> None:
        self.copies.append(copy)
        stack.callback(copy.close)

    def _write_file(self) -> None:
        head = (
            f'[player]\nname = "trial"\nbootstrap = "{",".join(self._log.endpoints)}"\n'
            f"lease_s = {_LEASE_S}\ncommit_ms = 100\n"
        )
        tables = "".join(copy.table for copy in self.copies)
        (self._directory / "player.toml").write_text(head + tables, encoding="utf-8")

    # --- processes of the player ---

    def _start(self, index: int) -> None:
        with (self._directory / f"player-{index}.log").open("ab") as errors:
            self._processes[index] = subprocess.Popen(
                self._command(),
                env={**environment(), "PYTHONFAULTHANDLER": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def _command(self) -> list[str]:
        arguments = ("ziplog", "player", "run", str(self._directory / "player.toml"))
        return recorded(self._history, *["--broken"] * self._is_broken, *arguments)

    def _wait_for_tasks(self) -> None:
        """Wait until every task has an owner."""
        tasks = sum(copy.partitions for copy in self.copies)
        deadline = time.monotonic() + _DRAIN_S
        while sum(one.state == "owned" for one in self._tasks()) < tasks:
            if time.monotonic() > deadline:
                raise RuntimeError("the processes do not own all tasks")
            time.sleep(0.1)

    def _tasks(self) -> list[CursorInfo]:
        """Return the cursors of the player, without those of its processes."""
        called, found = now(), self._log.cursors("trial/*")
        for one in found:
            numbers = (0, one.term, one.seek, one.position.gsn)
            self._recorder.result(events.CursorIs(called, now(), one.name, *numbers))
        return [one for one in found if not one.name.startswith("trial/members/")]

    def _kill_processes(self) -> None:
        for process in self._processes:
            if process is not None:
                process.kill()
                process.wait()

    def _any(self) -> tuple[int, subprocess.Popen[bytes]]:
        index = self._random.randrange(len(self._processes))
        process = self._processes[index]
        assert process is not None
        return index, process

    # --- faults ---

    @property
    def faults(self) -> dict[str, Callable[[], None]]:
        """What may happen, by name; each heals what it broke."""
        faults: dict[str, Callable[[], None]] = {
            "kill-player": self._kill_player,
            "suspend-player": self._suspend_player,
            "end-player": self._end_player,
            "kill-server": self._kill_server,
            "kill-membership-node": self._kill_membership_node,
            "kill-owner": self._kill_owner,
            "pause-cursor": self._pause_cursor,
            "release-cursor": self._release_cursor,
            "trim": self._trim,
        }
        for copy in self.copies:
            faults |= copy.faults
        return faults

    def _kill_player(self) -> None:
        index, process = self._any()
        process.kill()
        process.wait()
        self._start(index)

    def _suspend_player(self) -> None:
        """Suspend a process, for less or for longer than its lease."""
        _, process = self._any()
        process.send_signal(signal.SIGSTOP)
        time.sleep(self._random.choice((0.3, _LEASE_S + 1, 2 * _LEASE_S + 1)))
        process.send_signal(signal.SIGCONT)

    def _end_player(self) -> None:
        index, process = self._any()
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # Its log gets the stacks of its threads.
            process.wait()
            text = f"process {index} of the player did not end in {_STOP_S:g} s"
            raise RuntimeError(f"{text}; its log has the stacks of its threads") from None
        # A process that is told to stop before it has started ends with the signal.
        if code not in {0, -signal.SIGTERM}:
            raise RuntimeError(f"a process of the player ended with code {code}")
        self._start(index)

    def _kill_server(self) -> None:
        self._kill_node(f"shard-{self._random.randrange(_SHARDS)}-{self._random.randrange(2)}")

    def _kill_membership_node(self) -> None:
        self._kill_node(f"mms-{self._random.randrange(_MEMBERSHIP_NODES)}")

    def _kill_node(self, name: str) -> None:
        self._cluster.kill(name)
        time.sleep(1)
        self._cluster.restart(name)

    def _kill_owner(self) -> None:
        self._owners.kill(self._random.choice(self._owners.running()))
        self._owners.start()

    def _cursor(self) -> str:
        return self._random.choice(self._tasks()).name

    def _pause_cursor(self) -> None:
        name = self._cursor()
        self._log.pause_cursor(name)
        time.sleep(1)
        self._log.resume_cursor(name)

    def _release_cursor(self) -> None:
        self._log.release_cursor(self._cursor())

    def _trim(self) -> None:
        """Trim up to the least cursor, and try to trim beyond it."""
        self._log.trim(min(one.position for one in self._tasks()))
        tail = self._log.check_tail()
        with contextlib.suppress(TrimHeldError):
            self._log.trim(RecordId(tail.gsn + 1, tail.shard))

    def run(self, seconds: float, say: Callable[[str], None]) -> None:
        """Let faults happen for a while."""
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds:
            name = self._random.choice(sorted(self.faults))
            say(f"{now:7.2f} s  {name}")
            try:
                self.faults[name]()
                self._injected += 1
            except ZiplogError as error:  # An operator's call met another fault.
                say(f"{now:7.2f} s  {name}: {error}")
            time.sleep(self._random.uniform(0.2, 3.0))

    # --- the end ---

    def settle(self) -> float:
        """Stop the workload, and wait until everything is delivered; return how long it took."""
        if self._workload.has_ended:
            raise RuntimeError("the workload ended by an error: nothing was inserted after that")
        self._workload.stop()
        began = time.monotonic()
        tail = self._log.check_tail().gsn
        while behind := [
            f"{one.name} at gsn {one.position.gsn}"
            for one in self._tasks()
            if one.position.gsn <= tail
        ]:
            if time.monotonic() > began + _DRAIN_S:
                raise RuntimeError(f"not delivered up to gsn {tail}: {', '.join(behind)}")
            time.sleep(0.1)
        return time.monotonic() - began

    def judge(self) -> tuple[list[str], str]:
        """Return what is wrong, and the figures."""
        placed, possible = self._workload.placed, self._workload.possible
        wrong = [text for copy in self.copies for text in judge(copy, placed, possible)]
        wrong += [f"{name} failed" for name in self._owners.stop()]
        wrong += untried(self._injected, len(placed))
        for copy in self.copies:
            if copy.partitions == 1:
                gsns = [gsn for gsn, _ in copy.rows()]
                self._recorder.result(events.Holds(now(), f"trial/{copy.name}/0", gsns))
        self._recorder.flush()
        observed = gather(events.files_of([self._history]))
        wrong += [f"{one.rule}: {one.text}" for one in rules.check(observed).violations]
        rows = {copy.name: len(copy.rows()) for copy in self.copies}
        figures = f"{len(placed)} records, {len(possible)} of unknown outcome"
        steps = sum(len(task.deliveries) for task in observed.players.tasks.values())
        figures += f"; {steps} steps, {len(observed.cursors.commits)} commits of owners"
        return wrong, f"{figures}; rows: {rows}"
