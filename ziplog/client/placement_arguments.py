"""Checks of the callers' arguments about shards and regions: policies, regions, servers to add.

Rule: an argument that cannot work raises here, before anything is sent.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ziplog import policy as policies
from ziplog.client.common.requests import ChangeRegionRequest, ChangeRequest, Preferences
from ziplog.core.numbers import whole, whole_in
from ziplog.core.units import NS_PER_MS
from ziplog.core.view import Replica
from ziplog.errors import ConfigError
from ziplog.types import RegionInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from ziplog.client.common.requests import Change, Policy

_FAR: Final = "no storage server is in the region of this client: no shard is near"
_log: Final = logging.getLogger("ziplog.client")
#: Maximum number of a shard's replicas, and maximum length of a replica's name.
_MAX_REPLICAS: Final = 16
_MAX_NAME: Final = 128
ENDPOINT: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", re.ASCII)
_REGION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_REGION_VARIABLE: Final = "ZIPLOG_REGION"

_REPLICAS_RULE: Final = (
    "its servers, the primary first: 1 to 16 names (up to 128 characters) and their endpoints,"
    " such as {'s2r0': '127.0.0.1:7420', 's2r1': '127.0.0.1:7421'}, all different"
)


def check_shard(shard: object) -> int:
    """Return a shard number as a plain int.

    Raises:
        ConfigError: it is not one.

    """
    number = whole_in(shard, 0, 2**31)
    if number is None:
        raise ConfigError("shard", shard, "a shard id, a whole number from 0 on")
    return number


def region(given: str | None) -> str:
    """Return the region of a client; "": it has none.

    Args:
        given: its name; None: the one in the environment variable ZIPLOG_REGION.

    Raises:
        ConfigError: it is not a name.

    """
    name = os.environ.get(_REGION_VARIABLE, "") if given is None else given
    return "" if name == "" and given is None else _region_name(name)


def _region_name(name: object) -> str:
    if not isinstance(name, str) or _REGION.fullmatch(name) is None:
        allowed = "1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
        raise ConfigError("region", name, allowed)
    return str.__str__(name)


def change_region(name: str, deadline_ns: int, *, is_lost: bool) -> ChangeRegionRequest:
    """Return a request to give up a region, or to let it count again; "": nodes without a label.

    Raises:
        ConfigError: it is not a name.

    """
    return ChangeRegionRequest(deadline_ns, "" if name == "" else _region_name(name), is_lost)


def min_regions(given: object) -> int:
    """Return the least number of regions of an insert.

    Raises:
        TypeError: it is not a whole number.
        ConfigError: it is out of range.

    """
    number = whole(given)
    if number is None:
        raise TypeError(f"min_regions must be a whole number, not {type(given).__name__}")
    if not 1 <= number <= _MAX_REPLICAS:
        raise ConfigError("min_regions", given, f"a whole number from 1 to {_MAX_REPLICAS}")
    return number


def preferences(chosen: Policy | None, here: str | None, regions: int | None) -> Preferences:
    """Return how a client selects shards.

    Args:
        chosen: the policy; None: `nearest()` for a client with a region, else `random()`.
        here: the client's region; None: that of the environment.
        regions: least number of regions of an insert that requests no number; None: the cluster's.

    Raises:
        TypeError: `regions` is not a whole number.
        ConfigError: an argument is out of range, or `chosen` is not callable.

    """
    found = region(here)
    number = 0 if regions is None else min_regions(regions)
    if chosen is None:
        return Preferences(policies.nearest() if found else policies.random(), found, number)
    return Preferences(policies.checked("policy", chosen), found, number)


def regions(document: Mapping[str, Any], latency_ns: Callable[[int], int]) -> dict[str, RegionInfo]:
    """Return the regions of a status document.

    Args:
        document: the status document.
        latency_ns: returns the measured latency of inserts at a shard; 0: there is none.

    """
    found = {}
    placed = {
        shard["id"]: [replica["region"] for replica in shard["replicas"]]
        for shard in document["shards"]
    }
    for name, one in document["regions"].items():
        primaries = tuple(shard for shard, names in placed.items() if names[0] == name)
        replicas = tuple(shard for shard, names in placed.items() if name in names)
        least = min(filter(None, map(latency_ns, primaries)), default=None)
        insert_ms = None if least is None else least / NS_PER_MS
        found[name] = RegionInfo(one["state"], primaries, replicas, insert_ms)
    return found


def warn_of_region() -> None:
    """Log a warning: no storage server is in the region of a client."""
    _log.warning(_FAR)


def change(
    shard: int,
    what: Change,
    deadline_ns: int,
    replicas: Mapping[str, str] | None = None,
    regions: Mapping[str, str] | None = None,
) -> ChangeRequest:
    """Return a request to change a shard.

    `replicas`: the servers of a shard to add; `regions`: those of them that have one.

    Raises:
        ConfigError: `shard`, `replicas` or `regions` is invalid.

    """
    shard = check_shard(shard)
    added = _replicas(replicas, regions or {}) if what == "add" else ()
    return ChangeRequest(deadline_ns, shard, what, added)


def _replicas(replicas: object, regions: Mapping[str, str]) -> tuple[Replica, ...]:
    if not isinstance(replicas, Mapping) or not 1 <= len(replicas) <= _MAX_REPLICAS:
        raise ConfigError("replicas", replicas, _REPLICAS_RULE)
    for name, endpoint in replicas.items():
        match = ENDPOINT.fullmatch(endpoint) if isinstance(endpoint, str) else None
        is_name = isinstance(name, str) and 0 < len(name) <= _MAX_NAME and name.isprintable()
        if not is_name or match is None or not 0 < int(match[1]) < 2**16:
            raise ConfigError("replicas", dict(replicas), _REPLICAS_RULE)
    if len(set(replicas.values())) < len(replicas):
        raise ConfigError("replicas", dict(replicas), _REPLICAS_RULE)
    if not isinstance(regions, Mapping) or not regions.keys() <= replicas.keys():
        raise ConfigError("regions", regions, "a region for each of some servers of `replicas`")
    return tuple(
        Replica(
            str.__str__(name),
            str.__str__(endpoint),
            region=region(regions[name]) if name in regions else "",
        )
        for name, endpoint in replicas.items()
    )
