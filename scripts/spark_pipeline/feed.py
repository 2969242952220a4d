"""What the airlines send, in the order in which it is sent, and under which key.

The flights of `ziplog.demo.flights` as events ordered by time; a few are held back until their
aircraft's next event was sent, as messages are that take another way. Rule: an event's key is the
carrier that its aircraft flew for first (17 fly for two), so one aircraft has one key, and all its
events are in the log in the order of the feed. Pure: what is held back follows from the seed.
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
    """Yield the events, with one in so many sent after the next event of its aircraft.

    Args:
        events: as they happened.
        one_in: an event is held back with a probability of one in this; 0: none is.
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
