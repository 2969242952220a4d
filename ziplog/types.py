"""Identifiers and records: the vocabulary that every other module speaks.

A position of the log is a *gsn* (global sequence number, 1, 2, 3, ... below 2**63). A record
lives at one gsn of one shard, and the pair is its record identifier, `RecordId`.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from ziplog.errors import ConfigError

#: A position of the log. 0 is before every record; records start at 1.
Gsn = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
#: An epoch's number, from 0.
Epoch = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
#: A shard's number, from 0, never used again for another shard.
ShardId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
#: A shard's view: 1 at first, greater after each recovery.
View = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
#: Sequence number of an insert, counted per client and shard, from 1.
Seq = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
#: Position in the stream that a primary decides, from 1.
Fseq = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
#: When an insert counts as done: all f+1 replicas have it in memory, or on stable storage.
Durability = Literal["memory", "disk"]
#: 128 random bits, new in every client process.
ClientId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]

_UNIX_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TEXT_FORM: Final = re.compile(r"(\d{1,19})@(\d{1,10})", re.ASCII)


class RecordId(NamedTuple):
    """Where a record is: its global sequence number and the shard that stores it.

    Ordered by `gsn`, hashable, immutable. The text form is ``"<gsn>@<shard>"``
    (thesis 4.2.2: "a tuple consisting of its global sequence number and the shard identifier").
    """

    gsn: int
    shard: int

    def __str__(self) -> str:
        return "recent" if self.gsn < 0 else f"{self.gsn}@{self.shard}"

    @classmethod
    def parse(cls, text: str) -> RecordId:
        """Read the text form; `genesis` and `recent` name the two constants.

        Raises:
            ConfigError: the text is no record identifier.

        """
        match text:
            case "genesis":
                return RID_GENESIS
            case "recent":
                return RID_RECENT
        found = _TEXT_FORM.fullmatch(text)
        if found is None or int(found[1]) >= 2**63 or int(found[2]) >= 2**31:
            raise ConfigError("rid", text, "'<gsn>@<shard>', 'genesis' or 'recent'")
        return cls(int(found[1]), int(found[2]))


#: Before every record (thesis 4.2.1).
RID_GENESIS: Final = RecordId(0, 0)
#: For `subscribe` only: the last stable record below every shard's frontier (thesis 4.2.1).
RID_RECENT: Final = RecordId(-1, 0)


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record of the log, as readers get it."""

    #: Where it is.
    rid: RecordId
    #: What the client inserted; may be empty.
    payload: bytes
    #: The key that the client gave, if any.
    key: bytes | None
    #: When the client created it: microseconds since 1970-01-01 UTC, by the client's clock.
    timestamp_us: int
    #: The epoch that its gsn belongs to.
    epoch: int

    @property
    def timestamp(self) -> datetime:
        """When the client created it: an aware datetime in UTC."""
        return _UNIX_EPOCH + timedelta(microseconds=self.timestamp_us)
