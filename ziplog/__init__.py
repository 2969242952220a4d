"""Ziplog: a sharded, replicated, totally ordered log.

`connect` returns a client: insert records, read them, subscribe to them in log order. `aio` is the
same for asyncio, `policy` selects shards, `local` starts a cluster on this machine, `metrics`
exports a client's counters to Prometheus.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog import aio, errors, local, policy, speculation
    from ziplog.client.blocking import Log
    from ziplog.client.blocking_cursors import Cursor
    from ziplog.client.blocking_iterators import Scan, Subscription
    from ziplog.client.blocking_speculation import Speculation
    from ziplog.client.bulk.extents import Extent, Extents
    from ziplog.client.bulk.outline import ShardOutline
    from ziplog.client.common.requests import Blocked
    from ziplog.errors import (
        ClosedError,
        ClusterMismatchError,
        ConfigError,
        CursorHeldError,
        CursorLostError,
        DeadlineError,
        LocalProtocolError,
        NoSuchRecordError,
        OutcomeUnknownError,
        ProtocolError,
        RecordTooLargeError,
        TrimHeldError,
        TrimmedError,
        UnavailableError,
        VersionError,
        ZiplogError,
    )
    from ziplog.policy import Policy
    from ziplog.types import (
        RID_GENESIS,
        RID_RECENT,
        CursorInfo,
        Record,
        RecordId,
        RegionInfo,
    )

    __version__: str

__all__ = [
    "RID_GENESIS",
    "RID_RECENT",
    "Blocked",
    "ClosedError",
    "ClusterMismatchError",
    "ConfigError",
    "Cursor",
    "CursorHeldError",
    "CursorInfo",
    "CursorLostError",
    "DeadlineError",
    "Extent",
    "Extents",
    "LocalProtocolError",
    "Log",
    "NoSuchRecordError",
    "OutcomeUnknownError",
    "ProtocolError",
    "Record",
    "RecordId",
    "RecordTooLargeError",
    "RegionInfo",
    "Scan",
    "ShardOutline",
    "Speculation",
    "Subscription",
    "TrimHeldError",
    "TrimmedError",
    "UnavailableError",
    "VersionError",
    "ZiplogError",
    "aio",
    "connect",
    "errors",
    "local",
    "policy",
    "speculation",
]


def connect(
    bootstrap: str | Sequence[str] | None = None,
    *,
    timeout: float | None = None,
    policy: Policy | None = None,
    cluster_id: str | None = None,
    region: str | None = None,
    min_regions: int | None = None,
) -> Log:
    """Connect to a log.

    Args:
        bootstrap: nodes of the membership service: "host:port", several separated by commas or in a
            list, with or without "ziplog://" before them; a string may end with "/?cluster=ID".
            None: those in the environment variable ZIPLOG_BOOTSTRAP.
        timeout: the default time-out of every call, and that of connecting, in seconds; 10 if None.
            0 is too short to connect, so it raises DeadlineError.
        policy: selects the shards of inserts; None: `ziplog.policy.nearest()` for a client with a
            region, else `ziplog.policy.random()`.
        cluster_id: the id that the cluster must have (`cluster_id` in the status document); "": any
            cluster. None: the id in `bootstrap`, or in the environment variable ZIPLOG_CLUSTER_ID.
        region: the region in which this client runs. None: the one in the environment variable
            ZIPLOG_REGION, or none.
        min_regions: least number of regions in which a record must be before its insert returns,
            1 to 16, unless the call has another. None: the cluster's.

    Raises:
        ConfigError: `bootstrap` is not an address, or missing, or another argument is invalid.
        ClusterMismatchError: the cluster has another id.
        UnavailableError: no node answered at the addresses given.
        VersionError: the cluster speaks another version of the wire format.

    """
    try:
        from ziplog.client.blocking import Log  # noqa: PLC0415 - as below
    except OSError as error:
        from ziplog.errors import UnavailableError  # noqa: PLC0415

        raise UnavailableError(
            f"cannot load the client: {error}; if the process lacks descriptors, raise the limit"
            " (ulimit -n)"
        ) from error
    return Log(bootstrap, policy, timeout, cluster_id, region, min_regions)


#: The module of each name. It is imported when the name is first used: a server needs no client,
#: and the command line can be interrupted from its first instruction on.
_MODULES: Final = {
    "Blocked": "client.common.requests",
    "Cursor": "client.blocking_cursors",
    "CursorInfo": "types",
    "Extent": "client.bulk.extents",
    "Extents": "client.bulk.extents",
    "Log": "client.blocking",
    "RID_GENESIS": "types",
    "RID_RECENT": "types",
    "Record": "types",
    "RecordId": "types",
    "RegionInfo": "types",
    "Scan": "client.blocking_iterators",
    "ShardOutline": "client.bulk.outline",
    "Speculation": "client.blocking_speculation",
    "Subscription": "client.blocking_iterators",
}
_SUBMODULES: Final = frozenset(
    {"aio", "errors", "local", "metrics", "otel", "policy", "speculation", "testing", "types"}
)


def __getattr__(name: str) -> Any:
    """Load a name of this package on first use."""
    if name in _SUBMODULES:
        return importlib.import_module(f"ziplog.{name}")
    if name == "__version__":
        return importlib.import_module("ziplog.version").version()
    if name not in __all__:
        raise AttributeError(f"module 'ziplog' has no attribute {name!r}")
    module = importlib.import_module(f"ziplog.{_MODULES.get(name, 'errors')}")
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
