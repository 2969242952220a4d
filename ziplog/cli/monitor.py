"""`ziplog monitor`: serves the cluster's state over HTTP."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import msgspec
import typer

from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, Timeout, connect, say
from ziplog.client import arguments
from ziplog.config import is_loopback
from ziplog.errors import ConfigError, UnavailableError


def monitor(
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Listen at this address.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Listen at this port; 0: any free one.")
    ] = 7480,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="F", help="Clients must send its content as a bearer token."
        ),
    ] = None,
    coordinators: Annotated[
        str,
        typer.Option(
            "--coordinator",
            envvar="LOGDB_COORDINATOR",
            metavar="HOST:PORT",
            help="Coordinators of LogDB, separated by commas.",
        ),
    ] = "",
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
    *,
    json: Json = False,
) -> None:
    """Serve /metrics (Prometheus), /status, /healthz and /readyz until Ctrl-C; print the endpoint.

    Outside loopback, a token file is required.
    """
    from ziplog.monitor.server import Monitor, Snapshots  # noqa: PLC0415 - slow to import

    token = _read_token(token_file)
    if not token and not is_loopback(host):
        sentence = f"--token-file is required, because {host} is not a loopback address"
        raise ConfigError("--token-file", None, "given", message=sentence)
    with connect(bootstrap, timeout) as log:
        snapshots = Snapshots(log, arguments.endpoints(coordinators) if coordinators else ())
        try:
            server = Monitor(host, port, snapshots, token)
        except OSError as error:
            raise UnavailableError(f"cannot listen at {host}:{port}: {error.strerror}") from error
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with server:
            snapshots.start()
            serving = threading.Thread(target=server.serve_forever, name="monitor", daemon=True)
            serving.start()
            say(f"monitor of {bootstrap} at http://{server.endpoint}/metrics; Ctrl-C stops it")
            document = {"endpoint": server.endpoint, "bootstrap": bootstrap}
            shown = msgspec.json.encode(document).decode() if json else server.endpoint
            sys.stdout.write(f"{shown}\n")
            sys.stdout.flush()
            try:
                serving.join()
            finally:
                server.shutdown()
                snapshots.stop()


def _read_token(path: Path | None) -> str:
    if path is None:
        return ""
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise ConfigError("--token-file", str(path), "a file that contains a token")
    return token
