"""The base class of all messages, as far as drivers and nodes need to know it."""

from __future__ import annotations

import msgspec

from ziplog.core.fields import Cluster


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages."""

    cluster: Cluster
