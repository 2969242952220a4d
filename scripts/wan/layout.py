"""The cluster file of a cluster across regions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ziplog.config import ClusterConfig, NodeConfig, ShardConfig
from ziplog.config_text import dump
from ziplog.deploy.supervisor import CLUSTER_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wan.network import Network

#: A region without delays, from which a program starts and watches the others.
OPERATOR: Final = "operator"
_PORT: Final = 7000
#: Ports of one shard.
_SERVERS: Final = 16
_PASSWORD: Final = "sixteen characters"  # noqa: S105 - of a network on this machine


def setting(text: str) -> tuple[str, int]:
    """Return the key of `[cluster]` and the number that KEY=NUMBER names, for `argparse`."""
    name, _, value = text.partition("=")
    return name, int(value)


def triangle(regions: Sequence[str]) -> list[tuple[str, str]]:
    """Return shards of two servers: shard N has its primary in region N, its backup in the next."""
    return list(zip(regions, (*regions[1:], regions[0]), strict=True))


def write_file(
    directory: Path,
    network: Network,
    regions: Sequence[str],
    shards: Sequence[Sequence[str]],
    settings: Mapping[str, Any],
) -> None:
    """Write the cluster file of a new cluster. Its nodes have the labels of their regions.

    Args:
        directory: the cluster's; it is created.
        network: has the regions.
        regions: each gets a node of the membership service and one of the failure handler.
        shards: for each shard the regions of its servers, the primary first.
        settings: keys of `[cluster]`.

    """

    def service(name: str, first: int) -> tuple[NodeConfig, ...]:
        return tuple(
            NodeConfig(f"{name}-{index}", network.address(region), first, first + 1, region=region)
            for index, region in enumerate(regions)
        )

    def replica(shard: int, index: int, region: str) -> NodeConfig:
        port = _PORT + _SERVERS * (shard + 1) + index
        return NodeConfig(f"shard-{shard}-{index}", network.address(region), port, region=region)

    config = ClusterConfig(
        name="wan",
        data_dir=Path(),
        mms=service("mms", _PORT),
        failure_handlers=service("fh", _PORT + 2),
        shards=tuple(
            ShardConfig(shard, tuple(replica(shard, index, at) for index, at in enumerate(places)))
            for shard, places in enumerate(shards)
        ),
        insecure=True,
        raft_password=_PASSWORD,
        **settings,
    )
    directory.mkdir(mode=0o700, parents=True)
    path = directory / CLUSTER_FILE
    path.touch(mode=0o600)
    path.write_text(dump(config), encoding="utf-8")
