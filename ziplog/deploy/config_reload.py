"""Reload of the cluster file by the nodes of this machine: all of them apply a change, or none.

Also a change of one node's log level, which takes the same way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ziplog.config import load
from ziplog.config_changes import changes
from ziplog.deploy import node_logs
from ziplog.errors import ConfigError, DeadlineError, UnavailableError
from ziplog.runtime import log_level
from ziplog.runtime.settings_reload import read_used

if TYPE_CHECKING:
    from ziplog.client.blocking import Log
    from ziplog.config import ClusterConfig
    from ziplog.config_keys import Change
    from ziplog.runtime.settings_reload import Used
    from ziplog.types import Durability

_POLL_S: Final = 0.02


class Plan(NamedTuple):
    """What a reload would do."""

    config: ClusterConfig
    #: The changed settings, and when nodes can take each.
    changes: dict[str, Change]
    #: The running nodes of this machine that use other settings than the file has.
    nodes: dict[str, Used]


def plan(path: Path) -> Plan:
    """Compare a cluster file with the settings that the running nodes of this machine use.

    Raises:
        ConfigError: the file is not valid, or a node uses another file.
        UnavailableError: no node of it runs on this machine.

    """
    config = load(path)
    running = {
        name: used
        for name in (*(node.name for node in config.nodes), node_logs.MONITOR)
        if (used := read_used(config.data_dir / name, name)) is not None
    }
    if not running:
        raise UnavailableError(
            f"no node of {path} runs on this machine with its files in {config.data_dir}, or its"
            " release cannot reload; nodes read the file when they start"
        )
    for name, used in running.items():
        if not path.samefile(used.file):
            sentence = f"{name} uses {used.file}, not {path}; give that file"
            raise ConfigError("cluster file", str(path), used.file, message=sentence)
    found = {name: changes(used.settings, config) for name, used in running.items()}
    merged = {key: kind for one in found.values() for key, kind in one.items()}
    return Plan(config, merged, {name: running[name] for name in running if found[name]})


def apply(plan: Plan, timeout_s: float) -> None:
    """Have the nodes of a plan apply the changes, which must all be of the kind "reload".

    Raises:
        DeadlineError: a node did not confirm in time.

    """
    deadline = time.monotonic() + timeout_s
    for used in plan.nodes.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(used.pid, signal.SIGHUP)
    while late := [name for name, used in plan.nodes.items() if not _is_done(plan, name, used)]:
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{', '.join(late)} did not confirm the changes within {timeout_s:g} s; see the"
                " end of their logs, and run the command again"
            )
        time.sleep(_POLL_S)


def await_level(log: Log, level: Durability, timeout_s: float) -> int:
    """Wait until a durability level is in force; return the epoch since which it is.

    Raises:
        DeadlineError: a server does not keep to it in time.

    """
    deadline = time.monotonic() + timeout_s
    while (status := log.cluster())["durability"] != level:
        if time.monotonic() > deadline:
            change = status["durability_change"] or {"waits_for": ()}
            late = ", ".join(change["waits_for"]) or "the membership service"
            raise DeadlineError(
                f"durability is not {level} yet: waiting for {late}. Run the command on their"
                " machines with the same file; `ziplog status` shows when it is in force"
            )
        time.sleep(_POLL_S)
    since: int = status["durability_since_epoch"]
    return since


def set_log_level(
    path: Path, name: str, level: str | None, seconds: int | None, timeout_s: float
) -> None:
    """Change the log level of a running node of this machine, until its process ends.

    Args:
        path: the cluster file.
        name: the node.
        level: the new level; None: that of the cluster file.
        seconds: how long it holds; None: until the process ends.
        timeout_s: time limit for the node's confirmation.

    Raises:
        ConfigError: the file is not valid, or has no such node.
        UnavailableError: the node does not run on this machine.
        DeadlineError: the node did not confirm in time.

    """
    config = load(path)
    directory = config.data_dir / config.node(name).name
    used = read_used(directory, name)
    if used is None:
        raise UnavailableError(
            f"{name} does not run on this machine with its files in {directory}; run the command on"
            " the node's machine, as the user of the node"
        )
    request = log_level.request(directory, used.pid, level, seconds)
    with contextlib.suppress(ProcessLookupError):
        os.kill(used.pid, signal.SIGHUP)
    deadline = time.monotonic() + timeout_s
    while (now := read_used(directory, name)) is None or now.level_request != request.id:
        if now is None or now.pid != used.pid:
            raise UnavailableError(f"{name} ended or was restarted; run the command again")
        if time.monotonic() > deadline:
            raise DeadlineError(
                f"{name} did not confirm the log level within {timeout_s:g} s; if the process only"
                " hangs, the change applies once it continues"
            )
        time.sleep(_POLL_S)


def _is_done(plan: Plan, name: str, former: Used) -> bool:
    """Whether a node uses the settings; one that has ended reads them when it starts."""
    used = read_used(plan.config.data_dir / name, name)
    if used is None:
        return not Path(f"/proc/{former.pid}").exists()
    return not changes(used.settings, plan.config)
