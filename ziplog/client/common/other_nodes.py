"""Nodes that cannot serve a client: of another service, or of another version.

See docs/protocol.md, section 4 (rule 7).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.wire.node_info import VERSIONS

if TYPE_CHECKING:
    from ziplog.wire import NodeInfo

_NOUNS: Final = {
    "membership": "membership node", "storage": "storage server", "handler": "failure handler",
    "coordinator": "LogDB coordinator", "consensus": "the consensus port of",
    "receiver": "a player's receiver at",
}  # fmt: skip


#: Ziplog's nodes send a greeting at once.
_SILENT: Final = "something listens there, but does not reply: no Ziplog node, or one that hangs"


def speaks_another_version(info: NodeInfo) -> bool:
    """Whether a node and this client have no version of the wire format in common."""
    first, last = VERSIONS
    return info.last_wire < first or last < info.first_wire


def describe(info: NodeInfo) -> str:
    """Return why a node does not serve this client."""
    if speaks_another_version(info):
        return (
            f"Ziplog {info.version} there speaks wire version"
            f" {_range(info.first_wire, info.last_wire)}, this client {_range(*VERSIONS)}: install"
            " a release that speaks both"
        )
    cluster = f" of cluster {info.cluster_name!r}" if info.cluster_name else ""
    mms = f"; its membership service is at {', '.join(info.mms)}" if info.mms else ""
    return f"this is {_NOUNS.get(info.role, info.role)} {info.node}{cluster}{mms}"


def outcome(problem: str | None) -> str:
    """Return what came of the attempts to reach a node.

    `problem`: why the last attempt failed; "" if it succeeded; None if none has ended.
    """
    return "no reply" if problem is None else problem or _SILENT


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"
