"""What listens at a port: the only messages that peers of all versions understand.

Rule: their tags and fields never change; new fields are only added at the end. All other tags
contain the version, so a peer of another version cannot decode the other messages. See
docs/protocol.md, section 4 (rule 7).
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from ziplog.core.fields import Unsigned
from ziplog.core.message import Message
from ziplog.core.wire_use import WireRange
from ziplog.wire.base import VERSION, Name, Request

#: The versions of the wire format that this release knows.
VERSIONS: Final = WireRange(VERSION, VERSION)
#: MessagePack's first byte of arrays and of unsigned 16-bit integers.
_FIXARRAY: Final = range(0x90, 0xA0)
_ARRAY_16: Final = 0xDC
_UINT_16: Final = 0xCD

Role = Literal["membership", "storage", "handler", "coordinator", "consensus", "receiver"]


class NodeInfoQuery(Message, tag=1, frozen=True, gc=False):
    """Requests a `NodeInfo`."""

    request: Request


class NodeInfo(Message, tag=2, frozen=True, gc=False):
    """Describes the node that listens here.

    A node replies with it to `NodeInfoQuery`, to a client's message that it cannot decode, and,
    unless it is a membership node, to `Hello`. The membership leader sends it to nodes that report
    another wire version in use. Cluster 0: it has no cluster yet.
    """

    request: Request
    #: A `Role`; later releases may have others.
    role: Name
    #: Its name in the cluster file; a coordinator's endpoint.
    node: Name
    #: The cluster's name; "": unknown.
    cluster_name: Name
    #: The version of Ziplog that it runs.
    version: Name
    #: The first and the last version of the wire format that it can use.
    first_wire: Unsigned
    last_wire: Unsigned
    #: Endpoints of the membership service.
    mms: Annotated[list[Name], Meta(max_length=64)]
    #: The wire version that its cluster uses, as far as it knows; 0: unknown.
    wire: Unsigned = 0
    #: Free space of its disk, of a node of the services; None: unknown.
    free_bytes: Unsigned | None = None


def version_of(frame: bytes) -> int | None:
    """Return the version in a frame's tag; None: it has no tag of a versioned message."""
    if len(frame) < 6 or not (frame[0] in _FIXARRAY or frame[0] == _ARRAY_16):
        return None
    start = 1 if frame[0] in _FIXARRAY else 3
    return frame[start + 1] if frame[start] == _UINT_16 else None
