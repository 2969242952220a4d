"""The events that code under test logs."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ziplog.event_log import LOGGER, Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def events_go_to(receive: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Call a function with each event, of any level; nothing else gets the events meanwhile.

    An event is a dictionary: its fields, and its name and level as `event` and `log_level`.
    """

    class Receiver(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert isinstance(record.msg, Event)
            level = record.levelname.lower()
            receive({**record.msg.fields, "event": record.msg.name, "log_level": level})

    logger, receiver = logging.getLogger(LOGGER), Receiver()
    former = logger.level, logger.propagate
    logger.addHandler(receiver)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(receiver)
        logger.setLevel(former[0])
        logger.propagate = former[1]


@contextmanager
def captured_events() -> Iterator[list[dict[str, Any]]]:
    """Yield the list that gets each event."""
    events: list[dict[str, Any]] = []
    with events_go_to(events.append):
        yield events
