"""`ziplog shard`: adds, removes and finalizes shards of a running log."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from ziplog.cli import known_names
from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, Timeout, connect, say
from ziplog.cli.tables import cell, stdout, table
from ziplog.cli.terminal import print_json
from ziplog.config import ShardConfig, load
from ziplog.deploy import cluster_file, new_shard
from ziplog.deploy.supervisor import CLUSTER_FILE, running_pid
from ziplog.errors import ConfigError, DeadlineError, UnavailableError, ZiplogError
from ziplog.status_document import nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import ziplog
    from ziplog.config import ClusterConfig

app: Final = typer.Typer(
    help="Add shards to a running log, and remove them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_POLL_S: Final = 0.3
_PROC: Final = Path("/proc")
_NUMBERS: Final = frozenset({"id", "view", "rate/s", "weight", "holes"})

Number = Annotated[
    int,
    typer.Argument(
        metavar="N", min=0, help="The shard's number.", autocompletion=known_names.shards
    ),
]


@app.command("list")
def list_shards(
    *,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """List every shard that the log ever had; --json: one line for each.

    States: joining, live, parked and recovering (takes no records at the moment), leaving,
    finalized (takes no more records; stays readable).
    """
    with connect(bootstrap, timeout) as log:
        shards = log.cluster()["shards"]
    if json:
        for shard in shards:
            print_json(shard)
        return
    shown = table("id", "state", "view", "rate/s", "weight", "holes", "replicas", right=_NUMBERS)
    for shard in shards:
        fields = ("id", "state", "view", "rate_per_s", "weight", "holes")
        replicas = [f"{r['name']} {r['endpoint']} {r['state']}" for r in shard["replicas"]]
        shown.add_row(*(cell(shard.get(field)) for field in fields), "\n".join(replicas))
    stdout().print(shown)


@app.command()
def add(
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            metavar="D",
            help="Directory of `ziplog up`. [default: detected from the cluster's processes]",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="A cluster file that has the shard; start no server."
        ),
    ] = None,
    shard: Annotated[
        int | None,
        typer.Option(
            "--shard",
            min=0,
            metavar="N",
            help="The shard's number in that file.",
            autocompletion=known_names.shards,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            min=1,
            max=65_535,
            help="First port for its servers. [default: above the cluster's ports]",
        ),
    ] = None,
    *,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 60.0,
) -> None:
    """Add a shard; print its number once it takes records.

    On the machine where `ziplog up` runs: this command adds a new [[shard]] to the cluster file
    there, and `ziplog up` starts its servers. They get the next free ports. If that fails, the next
    attempt resumes it.

    If no `ziplog up` starts the servers: write the [[shard]] into the cluster file of its machines,
    start each server (ziplog node run --config FILE --node NAME), then: --config FILE --shard N.
    """
    if config is not None and port is not None:
        raise ConfigError("--port", port, "left out with --config, which has the ports")
    if (config is None) != (shard is None) or (config is not None and data_dir is not None):
        raise ConfigError(
            "--config",
            config and str(config),
            "given with --shard, and without --data-dir",
            message="--config and --shard must be given together, and without --data-dir",
        )
    until = time.monotonic() + timeout
    with connect(bootstrap, timeout) as log:
        document = log.cluster()
        if config is not None and shard is not None:
            added, logs = _shard_in_file(config, shard, document), "see the logs of its servers"
            _place(log, added, until, logs)
        else:
            added = _add_on_this_machine(log, data_dir or _find(document), port, until)
    servers = ", ".join(f"{node.name} at {node.endpoint}" for node in added.replicas)
    say(f"shard {added.id} is live: {servers}")
    if json:
        replicas = [{"name": node.name, "endpoint": node.endpoint} for node in added.replicas]
        print_json({"id": added.id, "state": "live", "replicas": replicas})
    else:
        sys.stdout.write(f"{added.id}\n")


@app.command()
def remove(
    number: Number,
    *,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 60.0,
) -> None:
    """Remove shard N for good; return when it takes no more records.

    Pending inserts complete; new ones go to other shards. The shard stays readable, so keep its
    servers running; they are supervised as before. Its number is never used again.
    """
    with connect(bootstrap, timeout) as log, _progress(log, number):
        log.remove_shard(number, timeout=timeout)
    if json:
        print_json({"id": number, "state": "leaving"})
    say(f"shard {number} takes no more records; it stays readable, so keep its servers running")


@app.command()
def finalize(
    number: Number,
    *,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 60.0,
) -> None:
    """Finalize shard N: remove it, if necessary, and wait until it cannot change any more.

    That is when all of its servers have all of its records on disk. The shard stays readable, so
    keep its servers running; only trims still change their files.
    """
    with connect(bootstrap, timeout) as log, _progress(log, number):
        log.finalize_shard(number, timeout=timeout)
    if json:
        print_json({"id": number, "state": "finalized"})
    say(f"shard {number} is finalized; it stays readable, so keep its servers running")


def _add_on_this_machine(
    log: ziplog.Log, directory: Path, port: int | None, until: float
) -> ShardConfig:
    """Add a shard to the cluster that a supervisor runs in `directory`."""
    path = directory / CLUSTER_FILE
    _check_is_of(path, load(path), log.cluster())
    if running_pid(directory) is None:
        raise UnavailableError(
            f"`ziplog up` is not running in {directory}, so the new servers would not be started."
            " Start it, or start the servers yourself (ziplog shard add --help)"
        )
    with cluster_file.exclusive_lock(path, until - time.monotonic()):
        added = new_shard.next_shard(path, [shard["id"] for shard in log.cluster()["shards"]], port)
        logs = f"the logs of its servers are in {directory / 'logs'}"
        _place(log, added, until, logs)
    return added


def _place(log: ziplog.Log, shard: ShardConfig, until: float, logs: str) -> None:
    try:
        with _progress(log, shard.id):
            new_shard.await_servers(shard, until)
            replicas = {node.name: node.endpoint for node in shard.replicas}
            regions = {node.name: node.region for node in shard.replicas if node.region}
            left = max(until - time.monotonic(), 0.001)
            log.add_shard(shard.id, replicas, regions=regions, timeout=left)
    except DeadlineError as error:
        raise DeadlineError(f"{error}; {logs}") from error


def _shard_in_file(path: Path, number: int, document: dict[str, Any]) -> ShardConfig:
    """Return a shard that an operator wrote into a cluster file."""
    config = load(path)
    _check_is_of(path, config, document)
    found = next((shard for shard in config.shards if shard.id == number), None)
    if found is None:
        ids = ", ".join(str(shard.id) for shard in config.shards)
        raise ConfigError(
            "--shard",
            number,
            f"one of {ids}",
            str(path),
            message=f"the file has no [[shard]] with id {number}; its ids are {ids}",
        )
    return found


def _check_is_of(path: Path, config: ClusterConfig, document: dict[str, Any]) -> None:
    """Refuse a cluster file of another cluster than the connected one."""
    endpoints = {node["endpoint"] for node in document["mms"]}
    if (config.name, {node.endpoint for node in config.mms}) != (document["cluster"], endpoints):
        where = ", ".join(sorted(endpoints))
        wanted = f"cluster {document['cluster']!r} at {where}"
        raise ConfigError(
            "cluster file",
            str(path),
            f"the file of {wanted}",
            message=f"{path} is the file of another cluster; --bootstrap leads to {wanted}",
        )


def _find(document: dict[str, Any]) -> Path:
    """Return the directory of the cluster file of the running cluster.

    It is found through the cluster's processes on this machine: the cluster does not publish its
    paths, which would mean nothing on another machine.
    """
    mistake: ConfigError | None = None
    for node in nodes_of(document):
        path = _config_of(node["pid"], node["name"]) if node["pid"] else None
        if path is None:
            continue
        try:
            config = load(path)
        except ConfigError as error:
            mistake = error
            continue
        with contextlib.suppress(ConfigError):
            _check_is_of(path, config, document)
            return path.parent
    if mistake is not None:
        raise mistake
    raise UnavailableError(
        "cannot find a process of this cluster on this machine; use --data-dir, or --config and"
        " --shard (ziplog shard add --help)"
    )


def _config_of(pid: int, name: str) -> Path | None:
    """Return the cluster file of process `pid`, if it is node `name` of some cluster."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    options = dict(pairwise(words))
    path = Path(options.get("--config", ""))
    return path if options.get("--node") == name and path.is_absolute() else None


@contextlib.contextmanager
def _progress(log: ziplog.Log, shard: int) -> Iterator[None]:
    """Show the state of a shard on a terminal, and nothing in a pipe."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    done = threading.Event()
    with console.status(f"shard {shard}") as shown:

        def poll() -> None:
            while not done.wait(_POLL_S):
                with contextlib.suppress(ZiplogError):
                    shown.update(_describe(log.cluster(timeout=1.0), shard))

        poller = threading.Thread(target=poll, name="ziplog-progress")
        poller.start()
        try:
            yield
        finally:
            done.set()
            poller.join()


def _describe(document: dict[str, Any], shard: int) -> str:
    found = next((one for one in document["shards"] if one["id"] == shard), None)
    if found is None:
        return f"shard {shard}: its servers are starting"
    replicas = ", ".join(f"{node['name']} {node['state']}" for node in found["replicas"])
    return f"shard {shard} is {found['state']}: {replicas}"
