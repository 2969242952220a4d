"""The base of all messages: what a driver and a node know of them."""

from __future__ import annotations

import msgspec

from ziplog.core.fields import Cluster


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages."""

    cluster: Cluster
