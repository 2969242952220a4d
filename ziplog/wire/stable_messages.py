"""Which messages of a server wait for its disk (docs/protocol.md, section 10).

At level `disk`, a message must not report data that a crash of the server could lose. Messages that
report nothing about stored data need not wait. Neither do those that report only stable data, which
is on all disks. `Early` and `Forward` report data that a crash may lose. Readers of `Early` count
on that, and a backup counts the primary's copy once a forward says that its disk has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ziplog.wire.handler import Suspect
from ziplog.wire.inserts import Leaving, Located, Refused, Synced
from ziplog.wire.reads import Deliver, Early, Frontier, ReadReply, TailReply, Trimmed
from ziplog.wire.replicas import Ahead, Beat, Forward
from ziplog.wire.service import Heartbeat, Rate

if TYPE_CHECKING:
    from ziplog.core.message import Message

_NEEDS_NO_DISK: Final = (
    Refused, Heartbeat, Rate, Deliver, Trimmed, TailReply, Frontier, Synced, Located, Beat, Suspect,
    Leaving, Ahead, Early, Forward,
)  # fmt: skip


def needs_disk(message: Message) -> bool:
    """Whether a message must wait until all entries before it are on stable storage."""
    if isinstance(message, ReadReply):
        return not message.stable
    return not isinstance(message, _NEEDS_NO_DISK)
