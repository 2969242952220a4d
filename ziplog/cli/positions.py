"""Positions of the log as arguments of the command line: one grammar for all verbs."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final

import ziplog
from ziplog.cli.moments import moment_us
from ziplog.cli.search import first_of_last, first_since
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ziplog.client.blocking import Log

    Find = Callable[[Log], ziplog.RecordId]

#: The allowed forms, for help texts.
FORMS: Final = "genesis|recent|end|GSN|RID|-N|@TIME|epoch:N"
_ALLOWED: Final = (
    "'genesis', 'recent', 'end', a gsn, '<gsn>@<shard>', '-N' (the last N records), '@TIME'"
    " or 'epoch:N'"
)
_GSN: Final = re.compile(r"\d{1,19}", re.ASCII)
_LAST: Final = re.compile(r"-(\d{1,9})", re.ASCII)
_EPOCH: Final = re.compile(r"epoch:(\d{1,18})", re.ASCII)


def parse(text: str, name: str = "position", *, excluded: Sequence[str] = ()) -> Find:
    """Return a function that finds the position of an argument with a client of the log.

    Args:
        text: "genesis"; "recent" (for readers); "end", the last position that is stable now; a gsn;
            "<gsn>@<shard>"; "-N", the first of the last N records; "@TIME", the first record since
            a time (`moment_us`); "epoch:N", the start of an epoch.
        name: the argument, for error messages.
        excluded: words that this argument does not take.

    Raises:
        ConfigError: it is none of these. The function raises it if there is no such epoch, and
            TrimmedError if the epoch was trimmed.

    """
    if text in excluded:
        raise ConfigError(name, text, allowed(*excluded))
    if text == "end":
        return lambda log: log.check_tail()
    if text.startswith("@"):
        return parse_time(text, name)
    if (last := _LAST.fullmatch(text)) and (count := int(last[1])) > 0:
        return lambda log: first_of_last(log, count)
    if found := _EPOCH.fullmatch(text):
        epoch = int(found[1])
        return lambda log: ziplog.RecordId(log.extents(1).epoch_start(epoch), 0)
    rid = _fixed(text, name, excluded)
    return lambda _: rid


def parse_time(text: str, name: str) -> Find:
    """Return a function that finds the first record since a time (`moment_us`)."""
    since_us = moment_us(name, text, time.time_ns() // 1000)
    return lambda log: first_since(log, since_us)


def parse_stop(text: str) -> Find:
    """Return the same for `--to`: the position before which a reader stops.

    "end" is the position after the last stable one, and "recent" is not allowed.
    """
    find = parse(text, "--to", excluded=("recent",))
    if text != "end":
        return find
    return lambda log: ziplog.RecordId(find(log).gsn + 1, 0)


def allowed(*excluded: str) -> str:
    """Return the allowed forms for an error, without some words."""
    text = _ALLOWED
    for word in excluded:
        text = text.replace(f"'{word}', ", "")
    return text


def is_fixed(text: str) -> bool:
    """Whether a position is the same for every log: "genesis", a gsn or a rid."""
    try:
        return _fixed(text, "").gsn >= 0
    except ConfigError:
        return False


def _fixed(text: str, name: str, excluded: Sequence[str] = ()) -> ziplog.RecordId:
    if _GSN.fullmatch(text):
        return ziplog.RecordId(int(text), 0)
    try:
        return ziplog.RecordId.parse(text)
    except ConfigError:
        raise ConfigError(name, text, allowed(*excluded)) from None
