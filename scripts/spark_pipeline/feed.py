"""Event feed: the events of all airlines in sending order, with their keys.

The events are the flights of `ziplog.demo.flights`, ordered by time. A few are delayed until after
their aircraft's next event, like messages on a slower route. Rule: an event's key is the first
carrier of its aircraft (17 aircraft fly for two), so each aircraft has one key, and all its events
are in the log in the order of the feed. Pure: the seed determines the delayed events.
"""

from __future__ import annotations

import random
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ziplog.demo.flights import Event

_CARRIER_LETTERS: Final = 2
_encode: Final = msgspec.json.Encoder().encode


class Batch(NamedTuple):
    """Payloads of one key, in their order: one call of `insert_many`."""

    key: str
    payloads: list[bytes]


def carrier(event: Event) -> str:
    """Return the carrier of an event's aircraft."""
    return event.flight[:_CARRIER_LETTERS]


def held_back(events: Iterable[Event], one_in: int, seed: int) -> Iterator[Event]:
    """Yield the events, some of them after the next event of their aircraft.

    Args:
        events: in order of time.
        one_in: an event is delayed with a probability of 1/`one_in`; 0: never.
        seed: of the choice.

    """
    rng = random.Random(seed)  # noqa: S311 - no secret
    held: dict[str, Event] = {}
    for event in events:
        earlier = held.pop(event.aircraft, None)
        if earlier is None and one_in and rng.randrange(one_in) == 0:
            held[event.aircraft] = event
            continue
        yield event
        if earlier is not None:
            yield earlier
    yield from held.values()


def batches(events: Iterable[Event], size: int) -> Iterator[Batch]:
    """Cut the feed into stretches of `size` events, and each of these by key."""
    home: dict[str, str] = {}
    rest = iter(events)
    while stretch := list(islice(rest, size)):
        by_key: dict[str, list[bytes]] = {}
        for event in stretch:
            key = home.setdefault(event.aircraft, carrier(event))
            by_key.setdefault(key, []).append(_encode(event))
        for key, payloads in by_key.items():
            yield Batch(key, payloads)
