"""The leases of a cluster, asked of its membership service: which weights were in force where."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from ziplog.client.common.lease_map import LeaseMap
from ziplog.runtime.transport import Transport
from ziplog.wire import ClusterInfo, Hello, LeaseHistory, LeaseQuery, decode, encode

if TYPE_CHECKING:
    from ziplog.core.view import Lease

_DEADLINE_S: Final = 10.0
_AGAIN_NS: Final = 200_000_000


def leases_of(endpoint: str) -> LeaseMap:
    """Return all leases of the cluster at `endpoint`, which has one node of that service.

    Raises:
        TimeoutError: it did not answer within 10 s.

    """
    transport = Transport()
    try:
        transport.connect(b"mms", endpoint)
        info = _request(transport, Hello(0, 1), ClusterInfo)
        leases = LeaseMap()
        gsn, number = 1, 2
        while True:
            history = _request(transport, LeaseQuery(info.cluster, number, gsn), LeaseHistory)
            if not history.runs or not leases.extend(history.runs) or leases.stop == gsn:
                return leases
            gsn, number = leases.stop, number + 1
    finally:
        transport.close()


def _request(transport: Transport, question: Any, kind: type[Any]) -> Any:
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        transport.send(b"mms", encode(question))
        transport.wait(_AGAIN_NS)
        while (received := transport.receive()) is not None:
            message: Any = decode(received[1])
            if type(message) is kind and message.request == question.request:
                return message
    raise TimeoutError(f"the membership service did not answer {type(question).__name__}")


def share_of(lease: Lease, shard: int) -> float:
    """Return the weight of `shard` over the mean weight of the other members; 0: it is none."""
    others = [member.weight for member in lease.members if member.shard != shard]
    own = next((member.weight for member in lease.members if member.shard == shard), 0)
    return own * len(others) / sum(others) if others else 1.0
