"""Settings of a running process: SIGHUP reads its cluster file again, and applies what it can.

A process applies all changes or none: if one change needs a restart, or the file has a mistake,
it logs why and goes on as before. Its directory holds the settings that it uses, in the file
`settings`, so that `ziplog config reload` knows them before and after the signal. If the directory
has a request of `ziplog node log-level`, SIGHUP changes only the log level. Rule: the signal
handler only queues a request; a thread reads the files and applies the changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from ziplog import event_log
from ziplog.config import load
from ziplog.config_changes import changes, flatten, refuse
from ziplog.core.units import NS_PER_S
from ziplog.errors import ZiplogError
from ziplog.runtime import log_level
from ziplog.runtime.clock import now_ns
from ziplog.runtime.descriptors import start_thread
from ziplog.runtime.process_logging import configure

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from ziplog.config import ClusterConfig
    from ziplog.config_tables import LogConfig
    from ziplog.runtime.log_level import LevelRequest

#: Its name in a node's directory; a process that stops cleanly deletes it.
SETTINGS_FILE: Final = "settings"


class Used(NamedTuple):
    """The settings that a running process uses."""

    pid: int
    #: The absolute path of its cluster file.
    file: str
    #: From `ziplog.config_changes.flatten`.
    settings: dict[str, Any]
    #: The id of the last `LevelRequest` that the process took; "": none.
    level_request: str = ""


def read_used(directory: Path, name: str) -> Used | None:
    """Return what the process of node `name` uses, from its directory; None if none runs."""
    try:
        used = msgspec.json.decode((directory / SETTINGS_FILE).read_bytes(), type=Used)
        arguments = Path(f"/proc/{used.pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, msgspec.DecodeError):
        return None
    # After a crash, the number may be another program's.
    return used if name.encode() in arguments and b"--config" in arguments else None


class SettingsReload:
    """Applies changes of the cluster file to this process, the process of one node."""

    def __init__(self, path: Path, config: ClusterConfig, name: str) -> None:
        """Queue requests from now on. From the main thread.

        Args:
            path: the cluster file.
            config: its contents, which the process uses.
            name: the node.

        """
        self._path: Final = path.absolute()
        self._directory: Final = config.data_dir / name
        self._name: Final = name
        self._settings = flatten(config)
        self._log_config = config.log
        #: The level of the last `LevelRequest`, and when it ends, in ns; None: neither.
        self._level: str | None = None
        self._level_ends: int | None = None
        self._level_request = ""
        self._apply: Callable[[ClusterConfig], object] = lambda _: None
        #: True: a request. False: stop. A `SimpleQueue` may be used by a signal handler.
        self._requests: Final[queue.SimpleQueue[bool]] = queue.SimpleQueue()
        self._thread: Final = threading.Thread(target=self._run, name="settings", daemon=True)
        signal.signal(signal.SIGHUP, self._request)

    def start(self, apply: Callable[[ClusterConfig], object] | None = None) -> None:
        """Handle requests from now on. Call once.

        Args:
            apply: sets what can change beside `[log]`; called on another thread.

        Raises:
            UnavailableError: the system refuses a thread.

        """
        if apply is not None:
            self._apply = apply
        # The file may have changed since it was loaded.
        self._requests.put(True)
        start_thread(self._thread, "cannot watch the settings")

    def stop(self) -> None:
        """Stop handling requests; returns when the last one is done. Call once, after `start`."""
        self._requests.put(False)
        self._thread.join()
        with contextlib.suppress(OSError):
            (self._directory / SETTINGS_FILE).unlink()

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        self._requests.put(True)

    def _run(self) -> None:
        while self._wait():
            if (found := log_level.take(self._directory)) is not None:
                self._set_level(found)
            else:
                self._try_reload()
            self._record()

    def _wait(self) -> bool:
        """Wait for a request, and end a log level whose time is over; False: stop."""
        while self._level_ends is not None:
            try:
                left_ns = max(self._level_ends - now_ns(), 0)
                return self._requests.get(timeout=left_ns / NS_PER_S)
            except queue.Empty:
                self._use_level(None, None)
        return self._requests.get()

    def _set_level(self, found: LevelRequest) -> None:
        ends = None if found.seconds is None else now_ns() + found.seconds * NS_PER_S
        self._use_level(found.level, ends)
        self._level_request = found.id

    def _use_level(self, level: str | None, ends: int | None) -> None:
        """Log from a level on, None: that of the cluster file, until `ends`, in ns."""
        shown = self._log_config.level if level is None else level
        event_log.info("log level changed", to=shown)
        self._level, self._level_ends = level, ends
        configure(self._name, self._log_in_use(self._log_config))

    def _log_in_use(self, log: LogConfig) -> LogConfig:
        return log if self._level is None else dataclasses.replace(log, level=self._level)

    def _try_reload(self) -> None:
        try:
            self._reload()
        except ZiplogError as error:
            event_log.error("settings not changed", reason=str(error))
        except Exception:  # noqa: BLE001 - a bug must not end the thread
            event_log.exception("settings not changed")

    def _reload(self) -> None:
        new = load(self._path)
        found = changes(self._settings, new)
        refuse(found)
        self._apply(new)
        if new.log.level != self._log_config.level:
            # The later change of the two holds.
            self._level = self._level_ends = None
        if new.log != self._log_config:
            configure(self._name, self._log_in_use(new.log))
        self._settings, self._log_config = flatten(new), new.log
        if found:
            event_log.info("settings changed", keys=",".join(sorted(found)))

    def _record(self) -> None:
        """Write the settings in use for other programs."""
        used = Used(os.getpid(), str(self._path), self._settings, self._level_request)
        fresh = self._directory / f"{SETTINGS_FILE}.tmp"
        try:
            fresh.unlink(missing_ok=True)
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(used))
            fresh.replace(self._directory / SETTINGS_FILE)
        except OSError as error:
            event_log.warning(
                "cannot write the settings in use",
                result="`ziplog config reload` does not find this node",
                file=str(fresh),
                error=error.strerror,
            )
