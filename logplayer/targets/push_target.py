"""Targets in other processes: a receiver gets the batches of a player as messages.

The player's node sends them itself (`logplayer.push.sender`), so no thread belongs to a target.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from logplayer.push.messages import decode_any
from logplayer.push.sender import mismatch
from logplayer.targets.settings import target_spec
from ziplog.config import require_loopback
from ziplog.core.units import NS_PER_S
from ziplog.errors import ConfigError, UnavailableError
from ziplog.runtime.clock import now_ns
from ziplog.runtime.listener import parse_endpoint
from ziplog.runtime.transport import Transport
from ziplog.wire import NodeInfo, NodeInfoQuery, encode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logplayer.contract import TargetSpec

#: A batch has to fit into one message.
MAX_BATCH_BYTES: Final = 8 * 1024 * 1024
_CHECK_NS: Final = 5 * NS_PER_S
_NAME: Final = b"receiver"
_INSECURE: Final = (
    "insecure=True (insecure = true in a file), which sends records over the network as they are"
)


def push_spec(
    name: str,
    address: str,
    settings: Mapping[str, object],
    *,
    stores_position: bool,
    insecure: bool,
) -> TargetSpec:
    """Return a target behind a receiver.

    Raises:
        ConfigError: an argument is invalid.

    """
    where = f"target {name}"
    if not isinstance(address, str):
        raise ConfigError("address", address, "'host:port'", where)
    try:
        host, port = parse_endpoint("address", address)
        require_loopback(host, insecure=insecure, name="address", unless=_INSECURE)
    except ConfigError as error:
        raise ConfigError(
            error.name, error.value, error.allowed, where, message=error.message
        ) from None
    if not port:
        raise ConfigError("address", address, "'host:port', with the receiver's port", where)
    if type(stores_position) is not bool:
        raise ConfigError("stores_position", stores_position, "True or False", where)
    spec = target_spec(
        name, None, settings, stores_position=stores_position, keeps_rejected=True, receiver=address
    )
    if spec.batch_bytes > MAX_BATCH_BYTES:
        raise ConfigError("batch_bytes", spec.batch_bytes, f"at most {MAX_BATCH_BYTES}", where)
    return spec


def check(address: str) -> None:
    """Check that a receiver listens at an address.

    Raises:
        UnavailableError: there is no reply in time.
        ConfigError: another program listens there, or a receiver of another version.

    """
    deadline = now_ns() + _CHECK_NS
    with contextlib.closing(Transport()) as transport:
        transport.connect(_NAME, address)
        transport.send(_NAME, encode(NodeInfoQuery(0, 1)))
        while (left := deadline - now_ns()) > 0:
            received = transport.wait_and_receive(left)
            if received is None:
                continue
            message = decode_any(received[1])
            problem = mismatch(message, address) if isinstance(message, NodeInfo) else ""
            if problem:
                raise ConfigError("address", address, "", message=problem)
            return
        problem = transport.changes.get(_NAME) or "no reply"
    raise UnavailableError(f"cannot reach the receiver at {address}: {problem}")
