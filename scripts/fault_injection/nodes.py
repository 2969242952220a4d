"""The nodes of a cluster on this machine, found and hurt from outside.

Rule: a node's process is the one that says so: its command line names the cluster file and the
node. That holds for every kind of node, however it was started, and whether it answers or not.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
from msgspec.structs import replace

from fault_injection import control
from fault_injection.control import ActiveFaults
from ziplog.config import load
from ziplog.deploy.supervisor import CLUSTER_FILE
from ziplog.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LAUNCHER: Final = str(Path(__file__).resolve().parents[1] / "faulty_node.py")
_POLL_S: Final = 0.005
#: Timeouts for the effect of a signal, and for the restart by a supervisor, in seconds.
_SIGNAL_S, _START_S = 10.0, 30.0
_BALLAST: Final = "ballast"
_MIB: Final = 1024 * 1024
#: Maximum number of bytes that a torn tail loses.
_MAX_TORN: Final = 64


class Nodes:
    """The nodes of the cluster in a data directory."""

    def __init__(self, data_dir: Path) -> None:
        """Look at the cluster file; nothing is done yet.

        Raises:
            ConfigError: there is no valid one.

        """
        self.data_dir: Final = data_dir.absolute()
        self.config: Final = load(self.data_dir / CLUSTER_FILE)
        self.names: Final = tuple(node.name for node in self.config.nodes)

    def group_of(self, name: str) -> tuple[str, ...]:
        """Return all nodes that do the same work as this one, itself among them."""
        config = self.config
        groups = [config.mms, config.failure_handlers, *(s.replicas for s in config.shards)]
        node = config.node(name)
        return next(tuple(n.name for n in group) for group in groups if node in group)

    # --- processes ---

    def find(self, name: str) -> int | None:
        """Return the process of a node; None if there is none."""
        self.config.node(name)
        return next((pid for pid, _ in self._processes(name)), None)

    def pid(self, name: str) -> int:
        """Return the process of a node.

        Raises:
            UnavailableError: there is none.

        """
        found = self.find(name)
        if found is None:
            raise UnavailableError(f"{name} does not run")
        return found

    def _processes(self, name: str) -> Iterator[tuple[int, list[str]]]:
        config = str(self.data_dir / CLUSTER_FILE)
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "-c" in words[:4]:
                continue  # it becomes one in a moment (ziplog/runtime/child_processes.py)
            pairs = set(pairwise(words))
            if ("--config", config) in pairs and ("--node", name) in pairs:
                yield process.pid, words

    def kill(self, name: str) -> None:
        """Kill a node (SIGKILL); returns when it is dead. Nothing happens if it was."""
        found = self.find(name)
        if found is not None:
            os.kill(found, signal.SIGKILL)
            _wait(lambda: not _runs(found), _SIGNAL_S, f"{name} is dead")

    def kill_all(self, names: Sequence[str]) -> None:
        """Kill nodes at once, before another process can notice that one is dead."""
        found = [pid for pid in map(self.find, names) if pid is not None]
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        _wait(lambda: not any(map(_runs, found)), _SIGNAL_S, "all are dead")

    def pause(self, name: str) -> None:
        """Pause a node (SIGSTOP); returns when it is stopped."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGSTOP)
        stopped = {psutil.STATUS_STOPPED, ""}
        _wait(lambda: _status(pid) in stopped, _SIGNAL_S, f"{name} stands still")

    def resume(self, name: str) -> None:
        """Resume a paused node (SIGCONT); does nothing if it is dead."""
        found = self.find(name)
        if found is not None:
            os.kill(found, signal.SIGCONT)

    def restart(self, name: str) -> None:
        """Stop a node cleanly (SIGTERM); returns when its supervisor has started it again.

        Raises:
            UnavailableError: it is not restarted in time.

        """
        old = self.pid(name)
        os.kill(old, signal.SIGTERM)
        _wait(lambda: self.find(name) not in {None, old}, _START_S, f"{name} is restarted")

    # --- the network ---

    def _set(self, name: str, **faults: Any) -> None:
        """Set some fields of a node's `ActiveFaults`."""
        self._need_layer(name)
        control.write(self.data_dir, name, replace(control.read(self.data_dir, name), **faults))

    def _silent_to(self, name: str) -> frozenset[str]:
        return control.read(self.data_dir, name).silent_to

    def _need_layer(self, name: str) -> None:
        self.config.node(name)
        for _, words in self._processes(name):
            if LAUNCHER not in words:
                raise UnavailableError(
                    f"{name} runs without a layer of faults: start the cluster with"
                    f" Cluster(..., launcher=[{LAUNCHER!r}])"
                )

    def cut(self, name: str, others: Sequence[str], *, one_way: bool = False) -> None:
        """Drop messages from a node to others, and, unless `one_way`, from them to it."""
        others = [other for other in others if other != name]
        self._set(name, silent_to=self._silent_to(name) | set(others))
        for other in () if one_way else others:
            self._set(other, silent_to=self._silent_to(other) | {name})

    def cut_from_peers(self, name: str) -> None:
        """Cut a node from the others of its group; clients and other nodes reach it."""
        self.cut(name, self.group_of(name))

    def cut_from_clients(self, name: str) -> None:
        """Cut a node from clients: all peers that are not nodes of the cluster."""
        self._set(name, no_clients=True)

    def isolate(self, name: str) -> None:
        """Cut a node from all nodes and clients."""
        self.cut(name, self.names)
        self.cut_from_clients(name)

    def slow(
        self,
        name: str,
        *,
        send_ms: float = 0.0,
        flush_ms: float = 0.0,
        notes_syncs: bool = False,
        to: Sequence[str] = (),
    ) -> None:
        """Delay a node's messages and flushes; `notes_syncs` records its flushed bytes.

        `to`: only the messages to these nodes are late; by default all, to clients, too.
        """
        self._set(
            name, send_ms=send_ms, flush_ms=flush_ms, notes_syncs=notes_syncs, late_to=frozenset(to)
        )

    def in_region(self, region: str) -> tuple[str, ...]:
        """Return the nodes that the cluster file places in a region.

        Raises:
            ConfigError: there are none.

        """
        names = tuple(node.name for node in self.config.nodes if node.region == region)
        if not names:
            known = sorted({node.region for node in self.config.nodes if node.region})
            raise ConfigError("--to", region, f"one of the regions {known}")
        return names

    def lose(self, name: str, percent: float) -> None:
        """Drop a percentage of a node's messages."""
        self._set(name, lost_percent=percent)

    def heal(self, name: str) -> None:
        """End all faults of `cut`, `slow`, `lose` and `fill_disk`, and resume the node."""
        control.write(self.data_dir, name, ActiveFaults())
        for other in self.names:
            current = control.read(self.data_dir, other)
            left = replace(current, silent_to=current.silent_to - {name})
            control.write(self.data_dir, other, left)
        with contextlib.suppress(OSError):
            (self.data_dir / name / _BALLAST).unlink()
        self.resume(name)

    def heal_all(self) -> None:
        """Heal every node."""
        for name in self.names:
            self.heal(name)

    # --- the disk ---

    def torn_tail(self, name: str, seed: int = 0) -> str:
        """Kill a storage server and cut up to 64 bytes off the end of its log.

        The result looks like a crash of the machine during a write.

        Args:
            name: the server; it need not run.
            seed: of the number of bytes.

        Returns:
            A description of the action.

        """
        chooser = random.Random(seed)  # noqa: S311 - no secret
        with self._paused(name):
            path = [path for path in self._segments(name) if path.stat().st_size][-1]
            size = path.stat().st_size
            cut = min(size, chooser.randint(1, _MAX_TORN))
            os.truncate(path, size - cut)
        return f"{path.name}: {cut} bytes from {size - cut} on are gone"

    def power_cut(self, names: Sequence[str], seed: int = 0) -> list[str]:
        """Kill storage servers at once, and discard a part of their unflushed bytes.

        Args:
            names: the servers; call `slow` with `notes_syncs` for them before.
            seed: of the number of bytes.

        Returns:
            A description of the action on each server.

        """
        chooser, said = random.Random(seed), []  # noqa: S311
        for name in names:
            self.pause(name)
        for name in names:
            path = self._segments(name)[-1]
            size = path.stat().st_size
            left = chooser.randint(min(size, control.synced(self.data_dir, name, path)), size)
            os.truncate(path, left)
            said.append(f"{path.name} of {name}: {left} of {size} bytes are left")
        self.kill_all(names)
        return said

    def bitflip(self, name: str, seed: int = 0) -> str:
        """Kill a storage server and flip one random bit of one segment file.

        Returns:
            A description of the action: the file, the offset and the bit.

        """
        chooser = random.Random(seed)  # noqa: S311
        with self._paused(name):
            path = chooser.choice([p for p in self._segments(name) if p.stat().st_size])
            offset, bit = chooser.randrange(path.stat().st_size), chooser.randrange(8)
            with path.open("r+b") as file:
                file.seek(offset)
                (old,) = file.read(1)
                file.seek(offset)
                file.write(bytes([old ^ 1 << bit]))
        return f"{path.name}: bit {bit} of byte {offset} is flipped"

    @contextlib.contextmanager
    def _paused(self, name: str) -> Iterator[None]:
        """Freeze a node and kill it, so that its supervisor does not restart it in between."""
        if self.find(name) is not None:
            self.pause(name)
        yield
        self.kill(name)

    def _segments(self, name: str) -> list[Path]:
        self.config.shard_of(name)
        found = sorted((self.data_dir / name / "segments").glob("*.seg"))
        if not any(path.stat().st_size for path in found):
            raise UnavailableError(f"{name} has written nothing yet")
        return found

    def fill_disk(self, name: str, size: int = 0) -> str:
        """Limit the free space of a storage server's disk to `size` bytes, until it is healed.

        If its directory has its own file system, a file fills it up to `size` bytes. Otherwise the
        fault layer reports a full disk to the process.

        Returns:
            A description of the action.

        """
        directory = self.data_dir / name
        if directory.stat().st_dev == self.data_dir.stat().st_dev:
            self._set(name, disk_bytes=size)
            return f"{name} may write {size} bytes"
        space = os.statvfs(directory)
        count = max(0, space.f_bavail * space.f_frsize - size)
        with (directory / _BALLAST).open("wb") as file, contextlib.suppress(OSError):
            while file.tell() < count:
                file.write(bytes(min(_MIB, count - file.tell())))
        return f"{directory} has {count} bytes of ballast"


def _status(pid: int) -> str:
    """Return the status of a process; "" if it is gone."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return ""


def _runs(pid: int) -> bool:
    return _status(pid) not in {"", psutil.STATUS_ZOMBIE}


def _wait(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise UnavailableError(f"after {timeout_s:g} s still not so: {what}")
        time.sleep(_POLL_S)
