"""The process of one storage server: `python -m shard --config cluster.toml --node NAME`.

Logs to stderr; one `ready` line there once it listens. SIGTERM or SIGINT: a clean stop, which
flushes and writes a checkpoint, exit 0. Exit codes: 1 the port or the directory is in use, or the
last flush failed; 2 bad usage or cluster file; 70 the server stopped to prevent harm.
The old checkpoint is used up before the first message (docs/protocol.md, section 9).
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from shard import holdings
from shard.archive.shared_state import SharedState
from shard.archive.supervisor import ArchiveFacts, ArchiveSupervisor
from shard.metrics import StorageMetrics
from shard.replica import Replica, ReplicaConfig
from shard.storage.data_directory import DataDirectory
from shard.storage.segment_store import SegmentStore
from shard.storage.store import FullError
from ziplog import event_log
from ziplog.config import load
from ziplog.core import view
from ziplog.core.node import ArchiveOpened, LevelRequested, SettingsChanged
from ziplog.core.units import NS_PER_MS
from ziplog.errors import ConfigError, UnavailableError, ZiplogError
from ziplog.runtime import level_file, wire_file
from ziplog.runtime.clock import now_ns
from ziplog.runtime.descriptors import raise_limit
from ziplog.runtime.driver import Driver
from ziplog.runtime.metrics import Reporter
from ziplog.runtime.node_info import node_info, this_release
from ziplog.runtime.process import require_assertions, run_process
from ziplog.runtime.process_logging import configure
from ziplog.runtime.publication_receiver import PublicationReceiver
from ziplog.runtime.settings_reload import SettingsReload
from ziplog.runtime.transport import Transport
from ziplog.wire import Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.config import ClusterConfig, NodeConfig
    from ziplog.core.holdings import ServerHoldings

#: The part of `flush_interval_ms` for the flusher; before, entries wait in the driver for others.
_FLUSHER_PART: Final = 0.8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a storage server until a stop signal; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shard", description="A storage server.")
    parser.add_argument("--config", type=Path, required=True, help="the cluster file")
    parser.add_argument("--node", required=True, help="the server's name in it")
    parser.add_argument("--holdings", action="store_true", help="write what it holds; then end")
    options = parser.parse_args(arguments)
    try:
        if options.holdings:
            found = _holdings(load(options.config), options.node)
            sys.stdout.buffer.write(msgspec.msgpack.encode(found))
        else:
            run(options.config, load(options.config), options.node)
    except ConfigError as error:
        print(f"shard: {error}", file=sys.stderr)
        return 2
    except (ZiplogError, OSError) as error:
        print(f"shard: {options.node}: {error}", file=sys.stderr)
        return 1
    return 0


def _holdings(config: ClusterConfig, name: str) -> ServerHoldings:
    config.shard_of(name)  # It raises ConfigError if there is no such server.
    path = config.data_dir / name
    return holdings.read(path, config.name, name, wire=wire_file.read(path, this_release()))


def run(path: Path, config: ClusterConfig, name: str) -> None:
    """Run the storage server `name` of the cluster file `path` until SIGTERM or SIGINT.

    Raises:
        ZiplogError: it could not start, or stop cleanly; the text gives the reason.

    """
    require_assertions()
    configure(name, config.log)
    settings = SettingsReload(path, config, name)
    raise_limit()
    identity = replica_config(config, name)
    wire = wire_file.read(config.data_dir / name, identity.release)
    directory = DataDirectory(config.data_dir / name, config.name, name)
    identity = msgspec.structs.replace(
        identity,
        identity=directory.identity.server,
        wire=wire,
        recorded_level=level_file.read(directory.path),
    )
    if (identity.recorded_level, config.durability) == ("disk", "memory"):
        event_log.warning("the cluster file lowers the durability level", file=str(path))
    try:
        transport = Transport(bind=config.node(name).bind)
        try:
            store = _open_store(config, directory, identity)
            _serve(identity, directory, transport, store, config, settings)
        finally:
            transport.close()
    finally:
        directory.close()


def replica_config(config: ClusterConfig, name: str) -> ReplicaConfig:
    """Return the configuration of the replica `name`.

    Raises:
        ConfigError: no storage server has this name.

    """
    shard, server = config.shard_of(name)
    return ReplicaConfig(
        name=name,
        endpoint=shard.replicas[server].endpoint,
        shard=shard.id,
        server=server,
        replicas=_addresses(shard.replicas),
        mms=_addresses(config.mms),
        durability=config.durability,
        pid=os.getpid(),
        limits=Limits(
            max_payload_bytes=config.max_payload_bytes,
            max_key_bytes=config.max_key_bytes,
            max_unsettled_units=config.max_unsettled_units,
            rtt_ms=config.rtt_ms,
        ),
        session_timeout_s=config.session_timeout_s,
        handlers=_addresses(config.failure_handlers),
        suspicion_ms=config.suspicion_ms,
        lag_fix=config.lag_fix,
        inserts_per_s=config.limits.inserts_per_s,
        insert_bytes_per_s=config.limits.insert_bytes_per_s,
        release=this_release(),
        region=shard.replicas[server].region or "",
    )


def _addresses(nodes: tuple[NodeConfig, ...]) -> tuple[view.Replica, ...]:
    return tuple(view.Replica(node.name, node.endpoint) for node in nodes)


def _acks_from_memory(identity: ReplicaConfig) -> bool:
    """Whether the server begins at level `memory`; else the driver flushes, before every ack."""
    return identity.durability == identity.recorded_level == "memory"


def _open_store(
    config: ClusterConfig, directory: DataDirectory, identity: ReplicaConfig
) -> SegmentStore:
    try:
        return SegmentStore.open(
            directory.segments,
            flush_interval_ms=config.flush_interval_ms * _FLUSHER_PART,
            in_background=_acks_from_memory(identity),
            segment_bytes=config.segment_bytes,
            cache_bytes=config.cache_bytes,
            reserve_bytes=config.disk_reserve_bytes,
        )
    except (OSError, FullError) as error:
        raise UnavailableError(f"cannot open {directory.segments}: {error}") from error


def _serve(
    identity: ReplicaConfig,
    directory: DataDirectory,
    transport: Transport,
    store: SegmentStore,
    config: ClusterConfig,
    settings: SettingsReload,
) -> None:
    # From here on, only the handlers that write a checkpoint may receive a signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    checkpoint = directory.read_checkpoint()
    limbo = directory.was_used and checkpoint is None
    replica = Replica(
        identity,
        store,
        checkpoint,
        limbo=limbo,
        incarnation=secrets.randbits(63),
        now=now_ns(),
    )

    def on_publication(publisher: bytes, frame: bytes) -> None:
        driver.post_frame(publisher, frame)  # created below, before it is called

    shared = SharedState()

    metrics = StorageMetrics(replica.state, store, lambda: shared.archive_next)
    publications = PublicationReceiver(on_publication)
    driver = Driver(
        replica,
        transport,
        store=store,
        insert_path=replica.plain_inserts,
        store_delay_ns=int(config.flush_interval_ms * NS_PER_MS * (1 - _FLUSHER_PART)),
        flush_before_send=not _acks_from_memory(identity),
        receive_publications=publications.receive_from,
        describe=lambda request: node_info(
            config, "storage", identity.name, replica.cluster, request, replica.wire_use
        ),
        record_wire=lambda wire: wire_file.record(directory.path, wire),
        record_level=lambda level: level_file.record(directory.path, level),
        report=Reporter(
            transport,
            lambda driver, now: metrics.collect(driver.short_acks, now),
            lambda: replica.cluster,
        ),
    )
    try:
        store.start(driver.post)
        settings.start(lambda new: _apply(new, store, driver))
        archive = _start_archive(config, identity, directory, store, replica, driver, shared)
        # Only now: if the system refuses a resource above, the next start needs the checkpoint.
        directory.delete_checkpoint()
    except (OSError, RuntimeError) as error:
        raise UnavailableError(
            f"the system refused a file, pipe or thread ({error}): raise the limits (ulimit -n,"
            " ulimit -u) or stop other processes, and start the server again"
        ) from error
    _log_ready(identity, transport, limbo=limbo)
    run_process(driver, transport, asks_node=True)
    # Nothing more is sent, and the last files may need the descriptors of the connections.
    transport.close()
    publications.close()
    settings.stop()
    _store_the_rest(directory, store, replica)
    archive.stop()
    event_log.info("stopped")


def _apply(new: ClusterConfig, store: SegmentStore, driver: Driver) -> None:
    """Apply the settings that can change while the server runs."""
    store.resize(new.cache_bytes, new.disk_reserve_bytes)
    limits = new.limits
    driver.post(SettingsChanged(new.suspicion_ms, limits.inserts_per_s, limits.insert_bytes_per_s))
    driver.post(LevelRequested(new.durability))


def _log_ready(identity: ReplicaConfig, transport: Transport, *, limbo: bool) -> None:
    event_log.info(
        "ready",
        endpoint=transport.endpoint,
        shard=identity.shard,
        durability=identity.durability,
        pid=identity.pid,
        version=identity.release.version,
        limbo=limbo,
    )


def _start_archive(
    config: ClusterConfig,
    identity: ReplicaConfig,
    directory: DataDirectory,
    store: SegmentStore,
    replica: Replica,
    driver: Driver,
    shared: SharedState,
) -> ArchiveSupervisor:
    """Start the archive: it serves blocks of sealed segments (docs/protocol.md, 14.2)."""
    name, node = identity.name, config.node(identity.name)
    arguments = [
        *("--directory", str(directory.segments), "--node", name),
        *("--host", node.host, "--port", str(node.archive_port or 0)),
        *("--shard", str(identity.shard), "--reserve", str(config.disk_reserve_bytes)),
        *("--log-level", config.log.level, "--log-format", config.log.format),
    ]
    archive = ArchiveSupervisor(
        arguments,
        shared,
        read_facts=lambda: ArchiveFacts(*replica.known),
        on_port=lambda port: driver.post(ArchiveOpened(port)),
    )
    shared.trim = replica.known[2]
    store.on_trim = lambda gsn: setattr(shared, "trim", gsn)
    store.flusher.on_seal = archive.on_sealed
    store.on_repair = archive.on_repaired
    if store.sealed_fseq:
        archive.on_sealed(store.sealed_fseq)
    archive.start()
    return archive


def _store_the_rest(directory: DataDirectory, store: SegmentStore, replica: Replica) -> None:
    """Store the last entries, and write the checkpoint from which the next start continues."""
    for entry in replica.last_entries():
        store.append(entry)
    checkpoint = replica.checkpoint()
    if not store.close():
        raise UnavailableError(
            f"no room in {directory.segments} for the last records: they are lost on this server,"
            " and the next start will wait for recovery"
        )
    try:
        directory.write_checkpoint(checkpoint)
    except OSError as error:
        raise UnavailableError(
            f"cannot write a checkpoint to {directory.path}: {error}; the next start will wait for"
            " recovery"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
