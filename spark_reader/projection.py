"""Projections: the columns and the row filters of a load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from spark_reader import schema

if TYPE_CHECKING:
    from spark_reader.options import Options


class Projection(msgspec.Struct, frozen=True):
    """The columns and the row filters of a load."""

    fields: tuple[schema.Field, ...]
    #: The cluster's name.
    topic: str
    #: Rows with since <= timestamp < until, in microseconds.
    since_us: int | None = None
    until_us: int | None = None
    #: Rows of these epochs, both included.
    first_epoch: int | None = None
    last_epoch: int | None = None


def projection_of(options: Options, fields: tuple[schema.Field, ...], topic: str) -> Projection:
    """Return the projection of a load."""
    return Projection(
        fields, topic, options.since_us, options.until_us, options.first_epoch, options.last_epoch
    )
