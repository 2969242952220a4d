"""What a transport counts: plain integers, which `ziplog.runtime.metrics` reads."""

from __future__ import annotations


class TransportCounters:
    """The counters of one transport; each starts at 0."""

    # With slots: an object with more than 30 attributes in a dict is slower to read.
    __slots__ = (
        "flooded",
        "handshakes",
        "received_bytes",
        "received_frames",
        "sent_bytes",
        "sent_frames",
        "silent",
        "unroutable",
    )

    def __init__(self) -> None:
        """Start at 0."""
        #: Frames received, and frames accepted for sending; some of the latter are dropped when
        #: their connection ends.
        self.received_frames = self.sent_frames = 0
        #: Bytes read from and written to sockets, with the frames' lengths and the greetings.
        self.received_bytes = self.sent_bytes = 0
        #: Frames dropped because there is no such peer.
        self.unroutable = 0
        #: Connections closed because incomplete frames of all connections used too much memory,
        #: and because the kernel got no reply from the peer.
        self.flooded = self.silent = 0
        #: Established connections by whether the peer sent its greeting: `ok`, `malformed` (it sent
        #: something else), `ended` (the connection ended before).
        self.handshakes = {"ok": 0, "malformed": 0, "ended": 0}
