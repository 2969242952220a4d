"""Groups of Raft processes that tests kill and pause, with clients that retry for ever.

One thread does everything: `run_until` receives the nodes' reports, proposes commands, and checks
for losses. A command is *acknowledged* when the node that proposed it reports its position.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.raft import node as node_module
from tests.raft.node import Settings, decode, encode
from tests.unit.ziplog.bench import free_endpoints

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.raft.node"])
#: Time after which a command without an acknowledgement is proposed again, in seconds.
PATIENCE_S = 5.0


class Running(NamedTuple):
    """A node's process and the pipe to it."""

    process: BaseProcess
    pipe: Connection


class Verdict(NamedTuple):
    """The comparison of nodes and acknowledgements at the end of a run."""

    acknowledged: int
    #: Acknowledged ids that are missing, or at another position, on some node.
    lost: list[int]
    #: All nodes applied the same commands in the same order.
    agree: bool
    #: Nodes that did not answer.
    silent: list[str]
    #: Reasons of nodes that stopped themselves.
    fatal: list[str]

    @property
    def is_good(self) -> bool:
        return self.agree and not (self.lost or self.silent or self.fatal)


class Group:
    """A group of nodes, each in a directory below `directory`."""

    def __init__(
        self, directory: Path, settings: Settings, size: int = 3, window: int = 60
    ) -> None:
        self.window = window
        self.directory = directory
        self.settings = dict.fromkeys("abcde"[:size], settings)
        self.nodes = dict(zip(self.settings, free_endpoints(size), strict=True))
        self.running: dict[str, Running] = {}
        self.command_size = 20
        self.acknowledged: dict[int, int] = {}
        self.contradicted: list[int] = []
        self.fatal: list[str] = []
        self.starts = 0
        #: The last report of each node, by kind.
        self.said: dict[str, dict[str, tuple[Any, ...]]] = {name: {} for name in self.nodes}
        self._is_loaded = False
        self._paused: set[str] = set()
        self._under_way: dict[str, dict[int, float]] = {name: {} for name in self.nodes}
        self._again: deque[int] = deque()
        self._next = 0
        self._token = 0

    # --- processes ---

    def start(self, name: str) -> None:
        ours, theirs = _context.Pipe()
        process = _context.Process(
            target=node_module.main,
            args=(name, self.nodes, str(self._home(name)), self.settings[name], theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        self.running[name] = Running(process, ours)
        self.said[name] = {}
        self.starts += 1

    def start_all(self) -> None:
        for name in self.nodes:
            self.start(name)

    def kill(self, name: str) -> None:
        """Kill a node like a power cut, except that the kernel still writes its data."""
        running = self.running.pop(name)
        self._paused.discard(name)
        running.process.kill()
        running.process.join()
        self._drain(name, running.pipe)
        running.pipe.close()
        self._again.extend(self._under_way[name])
        self._under_way[name].clear()

    def pause(self, name: str) -> None:
        self._paused.add(name)
        self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)
        self._paused.discard(name)

    def wipe(self, name: str) -> None:
        """Delete a killed node's directory."""
        assert name not in self.running
        shutil.rmtree(self._home(name))

    def close(self) -> None:
        for name in list(self.running):
            self.kill(name)

    def _home(self, name: str) -> Path:
        return self.directory / name

    def _signal(self, name: str, number: int) -> None:
        pid = self.running[name].process.pid
        assert pid is not None
        os.kill(pid, number)

    # --- the load ---

    def run_until(self, condition: Callable[[], object], timeout: float = 120.0) -> None:
        """Serve the nodes until a condition holds; fail if it does not within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, ("nothing came of it", self.said, self.fatal)
            self._serve()

    def run_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._serve()

    def load(self, is_loaded: bool) -> None:
        """Let clients propose commands from now on, or no new ones."""
        self._is_loaded = is_loaded

    def _serve(self) -> None:
        pipes = {running.pipe: name for name, running in self.running.items()}
        for pipe in multiprocessing.connection.wait(list(pipes), timeout=0.02):
            self._drain(pipes[pipe], pipe)  # type: ignore[index, arg-type]
        for name, running in list(self.running.items()):
            if running.process.exitcode is not None:  # it stopped itself
                self.kill(name)
                self.fatal.append(f"{name}: exit code {running.process.exitcode}")
                self.start(name)
        for name in self.running:
            self._propose(name)

    def _drain(self, name: str, pipe: Connection) -> None:
        try:
            while pipe.poll():
                self._take(name, *decode(pipe.recv_bytes()))
        except (EOFError, OSError):
            pass  # it was killed

    def _take(self, name: str, kind: str, *values: Any) -> None:
        if kind == "acknowledged":
            number, position = values
            self._under_way[name].pop(number, None)
            if self.acknowledged.setdefault(number, position) != position:
                self.contradicted.append(number)
        elif kind == "fatal":
            self.fatal.append(f"{name}: {values[0]}")
        else:
            self.said[name][kind] = values

    def _propose(self, name: str) -> None:
        under_way, now = self._under_way[name], time.monotonic()
        if "started" not in self.said[name]:
            return
        for number, since in list(under_way.items()):
            if now > since + PATIENCE_S:  # its fate is unknown; the ledger takes it once
                under_way[number] = now
                self._tell_all(number, name)
        while len(under_way) < self.window and (self._again or self._is_loaded):
            if self._again:
                number = self._again.popleft()
            else:
                self._next += 1
                number = self._next
            under_way[number] = now
            self._tell_all(number, name)

    def _tell_all(self, number: int, first: str) -> None:
        """Let the leader propose a command; the others drop it.

        A paused node reads nothing, so it gets only those that it is the first to get.
        """
        for name in self.running:
            if name == first or name not in self._paused:
                self.tell(name, "propose", number, self.command_size)

    def tell(self, name: str, *order: Any) -> None:
        with contextlib.suppress(OSError):  # it was killed
            self.running[name].pipe.send_bytes(encode(order))

    # --- queries ---

    def ask(self, name: str, question: str, kind: str, timeout: float = 20.0) -> tuple[Any, ...]:
        self.said[name].pop(kind, None)
        self.tell(name, question)
        self.run_until(lambda: kind in self.said[name] or name not in self.running, timeout)
        return self.said[name][kind]

    def status(self, name: str) -> dict[str, Any]:
        status: dict[str, Any] = self.ask(name, "status", "status")[0]
        return status

    def leader(self, timeout: float = 60.0) -> str:
        """Wait for a leader, and return its name."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for name in list(self.running):
                if self.status(name)["is_leader"]:
                    return name
            self.run_for(0.05)
        raise AssertionError("there is no leader")

    def barrier(self, name: str, timeout: float = 60.0) -> None:
        """Wait until a node has applied all committed entries."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self._token += 1
            token, patience = self._token, time.monotonic() + 2.0
            for one in sorted(self.running, key=lambda one: one != name):  # the leader takes it
                self.tell(one, "barrier", token)
            self.run_until(
                lambda token=token, patience=patience: (  # type: ignore[misc]
                    self.said[name].get("barrier") == (token,) or time.monotonic() > patience
                )
            )
            if self.said[name].get("barrier") == (token,):
                return
        raise AssertionError(f"{name} does not catch up")

    def verdict(self, timeout: float = 60.0) -> Verdict:
        """Wait for pending commands, and compare the nodes with the acknowledgements."""
        self.load(False)
        for name in self.nodes.keys() - self.running.keys():
            self.start(name)
        deadline = time.monotonic() + timeout
        ledgers: dict[str, tuple[Any, ...]] = {}
        silent: list[str] = []
        while time.monotonic() < deadline:
            ledgers, silent = {}, []
            for name in self.nodes:
                try:
                    self.run_until(self._is_quiet, max(1.0, deadline - time.monotonic()))
                    self.barrier(name, timeout=10.0)
                    ledgers[name] = self.ask(name, "ledger_now", "ledger")
                except (AssertionError, KeyError):
                    silent.append(name)
            if not silent and len({ledger[1] for ledger in ledgers.values()}) == 1:
                break
        lost = set(self.contradicted)
        for ids, _digest in ledgers.values():
            at = {number: position for position, number in enumerate(ids)}
            lost |= {n for n, position in self.acknowledged.items() if at.get(n) != position}
        agree = len({(tuple(ids), digest) for ids, digest in ledgers.values()}) == 1
        return Verdict(len(self.acknowledged), sorted(lost), agree, silent, self.fatal)

    def _is_quiet(self) -> bool:
        return not self._again and not any(self._under_way.values())
