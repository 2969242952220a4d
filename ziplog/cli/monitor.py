"""`ziplog monitor`: serves the cluster's state over HTTP."""

from __future__ import annotations

import contextlib
import enum
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, Timeout, connect, say
from ziplog.cli.terminal import print_json
from ziplog.client import arguments
from ziplog.config import ClusterConfig, load
from ziplog.config_tables import MonitorConfig, is_loopback
from ziplog.deploy.node_logs import MONITOR
from ziplog.errors import ConfigError
from ziplog.runtime.waiting import Latch

if TYPE_CHECKING:
    from ziplog.monitor.service import MonitorService


class Nodes(enum.StrEnum):
    """The nodes whose metrics a monitor serves."""

    ALL = "all"
    LOCAL = "local"


Host = Annotated[
    str | None,
    typer.Option("--host", metavar="ADDRESS", help="Listen at this address. [default: 127.0.0.1]"),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port", min=0, max=65535, help="Listen at this port; 0: any free one. [default: 7480]"
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", metavar="F", help="Clients must send its content as a bearer token."
    ),
]
Coordinators = Annotated[
    str,
    typer.Option(
        "--coordinator",
        envvar="LOGDB_COORDINATOR",
        metavar="HOST:PORT",
        help="Coordinators of LogDB, separated by commas.",
    ),
]
Asked = Annotated[
    Nodes, typer.Option("--nodes", help="local: only nodes at addresses of this machine.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Monitor the cluster of this file, as its table [monitor] says.",
    ),
]


def monitor(
    host: Host = None,
    port: Port = None,
    token_file: TokenFile = None,
    coordinators: Coordinators = "",
    nodes: Asked = Nodes.ALL,
    config: ConfigFile = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
    *,
    json: Json = False,
) -> None:
    """Serve /metrics (Prometheus), /status, /healthz and /readyz until Ctrl-C; print the endpoint.

    Outside loopback, a token file is required. With --config, `ziplog config reload` applies a
    changed [monitor].
    """
    from ziplog.monitor.nodes import LocalEndpoints  # noqa: PLC0415 - slow to import
    from ziplog.monitor.server import Snapshots  # noqa: PLC0415
    from ziplog.monitor.service import MonitorService  # noqa: PLC0415

    cluster = None if config is None else load(config)
    if cluster is None:
        settings = _settings(host, port, token_file)
    else:
        settings = _settings_of(cluster, [host, port, token_file])
        bootstrap = cluster.bootstrap
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(connect(bootstrap, timeout))
        asked = arguments.endpoints(coordinators) if coordinators else ()
        is_asked = LocalEndpoints() if nodes is Nodes.LOCAL else None
        snapshots = Snapshots(log, asked, is_asked)
        service = MonitorService(snapshots)
        stack.callback(service.stop)
        service.serve(settings, Path() if config is None else config.parent)
        signal.signal(signal.SIGTERM, _end)
        stack.callback(snapshots.stop)
        snapshots.start()
        if cluster is not None and config is not None:
            _follow(stack, config, cluster, service)
        say(f"monitor of {bootstrap} at http://{service.endpoint}/metrics; Ctrl-C stops it")
        if json:
            print_json({"endpoint": service.endpoint, "bootstrap": bootstrap})
        else:
            sys.stdout.write(f"{service.endpoint}\n")
        sys.stdout.flush()
        Latch().wait()


def _end(_signal: int, _frame: object) -> NoReturn:
    """End the process cleanly: SIGTERM is how a service manager stops it."""
    raise SystemExit(0)


def _settings(host: str | None, port: int | None, token_file: Path | None) -> MonitorConfig:
    """Return the settings of the options."""
    if token_file is None and not is_loopback(host or MonitorConfig.host):
        sentence = f"--token-file is required, because {host} is not a loopback address"
        raise ConfigError("--token-file", None, "given", message=sentence)
    return MonitorConfig(
        host or MonitorConfig.host,
        MonitorConfig.port if port is None else port,
        None if token_file is None else str(token_file),
    )


def _settings_of(cluster: ClusterConfig, given: list[object]) -> MonitorConfig:
    """Return the settings of a cluster file."""
    if given != [None] * len(given):
        sentence = "leave out --host, --port and --token-file: --config has them in [monitor]"
        raise ConfigError("--config", None, "given alone", message=sentence)
    if cluster.monitor is None or not cluster.monitor.port:
        sentence = "the cluster file has no table [monitor] with a port; add it"
        raise ConfigError("[monitor]", None, "given", message=sentence)
    return cluster.monitor


def _follow(
    stack: contextlib.ExitStack, path: Path, cluster: ClusterConfig, service: MonitorService
) -> None:
    """Apply changes of the cluster file's [monitor] from now on."""
    from ziplog.runtime.process_logging import configure  # noqa: PLC0415 - slow to import
    from ziplog.runtime.settings_reload import SettingsReload  # noqa: PLC0415

    def apply(new: ClusterConfig) -> None:
        if new.monitor is None or not new.monitor.port:
            service.stop()
        else:
            service.serve(new.monitor, path.parent)

    configure(MONITOR, cluster.log)
    (cluster.data_dir / MONITOR).mkdir(mode=0o700, parents=True, exist_ok=True)
    reload = SettingsReload(path, cluster, MONITOR)
    reload.start(apply)
    stack.callback(reload.stop)
