"""Reload of the cluster file by the nodes of this machine: all of them apply a change, or none."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ziplog.config import load
from ziplog.config_changes import changes
from ziplog.errors import ConfigError, DeadlineError, UnavailableError
from ziplog.runtime.settings_reload import read_used

if TYPE_CHECKING:
    from ziplog.config import ClusterConfig
    from ziplog.config_keys import Change
    from ziplog.runtime.settings_reload import Used

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
        node.name: used
        for node in config.nodes
        if (used := read_used(config.data_dir / node.name, node.name)) is not None
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


def _is_done(plan: Plan, name: str, former: Used) -> bool:
    """Whether a node uses the settings; one that has ended reads them when it starts."""
    used = read_used(plan.config.data_dir / name, name)
    if used is None:
        return not Path(f"/proc/{former.pid}").exists()
    return not changes(used.settings, plan.config)
