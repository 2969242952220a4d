"""Positions of the log as arguments of the command line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import ziplog
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from ziplog.client.blocking import Log

#: The allowed forms, for help texts.
FORMS: Final = "genesis|recent|end|GSN|RID"
_GSN: Final = re.compile(r"\d{1,19}", re.ASCII)


def position(text: str, log: Log) -> ziplog.RecordId:
    """Return the position that an argument names.

    Args:
        text: "genesis", "recent" (for readers), "end" (the last position that is stable now), a
            gsn, or "<gsn>@<shard>".
        log: a client of the log.

    Raises:
        ConfigError: it is none of these.

    """
    if text == "end":
        return log.check_tail()
    if _GSN.fullmatch(text):
        return ziplog.RecordId(int(text), 0)
    try:
        return ziplog.RecordId.parse(text)
    except ConfigError:
        allowed = "'genesis', 'recent', 'end', a gsn, or '<gsn>@<shard>'"
        raise ConfigError("position", text, allowed) from None
