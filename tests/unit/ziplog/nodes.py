"""A data directory with idle processes as nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tests.waiting import wait_until
from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
from ziplog.config_text import dump
from ziplog.deploy.supervisor import CLUSTER_FILE

if TYPE_CHECKING:
    from ziplog.deploy.supervisor import Supervisor

IDLE = """
import signal, sys
print(" ".join(("ready", *sys.argv[1:])), file=sys.stderr, flush=True)  # in one write
while True:
    signal.pause()
"""
STUBBORN = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
{IDLE}
"""

#: It ends at the second SIGTERM.
PATIENT = f"""
import signal
signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
{IDLE}
"""


def make(directory: Path, *, handler_port: int = 7403) -> None:
    """Write a cluster file, with server modules that only wait."""
    for package, source in (("mms", IDLE), ("failure_handler", IDLE), ("shard", STUBBORN)):
        (directory / package).mkdir()
        (directory / package / "__init__.py").touch()
        rewrite(directory, package, source)
    config = ClusterConfig(
        name="demo",
        data_dir=directory,
        f=0,
        mms=(NodeConfig("mms-0", "127.0.0.1", 7400, 7401),),
        failure_handlers=(NodeConfig("fh-0", "127.0.0.1", handler_port, 7404),),
        shards=(ShardConfig(0, (NodeConfig("shard-0-0", "127.0.0.1", 7402),)),),
    )
    (directory / CLUSTER_FILE).write_text(dump(config))


def rewrite(directory: Path, package: str, source: str) -> None:
    """Replace the program of this package's nodes, from their next start on."""
    (directory / package / "__main__.py").write_text(source)


def ready(running: Supervisor, name: str) -> int:
    running.start(name)
    wait_until(lambda: "ready" in running.log_tail(name), f"{name} is ready")
    return running.pid(name)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
