"""Test kit of the replicated services: their cluster files, and a base of their worlds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
from ziplog.core.node import (
    Broadcast,
    Connect,
    Effect,
    LogWarning,
    Propose,
    Publish,
    RecordWire,
    ReportBadMessage,
    Send,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.core.message import Message

MS: Final = 1_000_000
S: Final = 1000 * MS
CLUSTER: Final = 4711


def cluster_config(
    shards: int = 1,
    *,
    f: int = 1,
    mms: int = 1,
    handlers: int = 0,
    ports: Iterator[int] | None = None,
    data_dir: Path = Path("nowhere"),
    **options: Any,
) -> ClusterConfig:
    """Return a cluster file on loopback; without `ports`, of nodes that open no socket."""

    def node(name: str, port: int, raft_port: int | None = None) -> NodeConfig:
        if ports is not None:
            port, raft_port = next(ports), raft_port and next(ports)
        return NodeConfig(name, "127.0.0.1", port, raft_port)

    return ClusterConfig(
        name="c",
        data_dir=data_dir,
        f=f,
        mms=tuple(node(f"mms-{i}", 7000 + i, 7100 + i) for i in range(mms)),
        failure_handlers=tuple(node(f"fh-{i}", 7200 + i, 7300 + i) for i in range(handlers)),
        shards=tuple(
            ShardConfig(
                shard,
                tuple(node(f"shard-{shard}-{i}", 8000 + (f + 1) * shard + i) for i in range(f + 1)),
            )
            for shard in range(shards)
        ),
        **options,
    )


class ServiceWorld:
    """Base of worlds of service nodes: carries out their effects in virtual time."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.now = 1000 * S
        self.warnings: list[str] = []
        self.complaints: list[str] = []
        #: The wire versions that nodes recorded in their directories, in order.
        self.recorded: list[tuple[str, int]] = []

    def carry_out(self, name: str, effects: list[Effect]) -> None:
        """Carry out the effects of the node with a name."""
        for effect in effects:
            match effect:
                case Send():
                    self.transmit(name, effect.dst, effect.message)
                case Broadcast():
                    for dst in effect.dsts:
                        self.transmit(name, dst, effect.message)
                case Publish():
                    self.publish(name, effect.message)
                case Propose():
                    self.propose(name, effect.command)
                case LogWarning():
                    self.warnings.append(effect.text)
                case ReportBadMessage():
                    self.complaints.append(effect.reason)
                case RecordWire():
                    self.recorded.append((name, effect.wire))
                case Connect():
                    pass
                case _:
                    raise AssertionError(effect)

    def transmit(self, src: str, dst: bytes, message: Message) -> None:
        """Send a message of a node."""
        raise NotImplementedError

    def publish(self, name: str, message: Message) -> None:
        """Send a message to all that receive a node's publications."""
        raise NotImplementedError

    def propose(self, name: str, command: bytes) -> None:
        """Propose a command of a node to consensus."""
        raise NotImplementedError
