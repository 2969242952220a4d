"""A target that publishes records to NATS JetStream: each at least once, in order.

    [[target]]
    name = "copy"
    kind = "function"
    function = "player_nats:NatsStream"

A message has the record's id in `Nats-Msg-Id`. The stream drops an id that it has got within its
`duplicate_window` (two minutes by default), so a repetition within it has no effect; one after it
is there twice. Needs `pip install nats-py`, and a stream that has the subjects `ziplog.*`. NATS_URL
says where the server is.
"""

from __future__ import annotations

import asyncio
import os

import nats

from logplayer import Batch, Opened, Task

URL = "nats://127.0.0.1:4222"
SUBJECT = "ziplog"


class NatsStream:
    """Publishes the records of one task to SUBJECT.PARTITION."""

    stores_position = False

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = nats.NATS()

    def open(self, task: Task) -> Opened:  # noqa: ARG002 - the contract's
        """Continue at the cursor."""
        return Opened()

    def deliver(self, batch: Batch) -> None:
        """Publish each record, and wait until the stream has it: the next one comes after it."""
        self._loop.run_until_complete(self._publish(batch))

    async def _publish(self, batch: Batch) -> None:
        if not self._client.is_connected:
            url = os.environ.get("NATS_URL", URL)
            self._client = await nats.connect(url, allow_reconnect=False)
        stream, subject = self._client.jetstream(), f"{SUBJECT}.{batch.task.partition}"
        for record in batch.records:
            headers = {"Nats-Msg-Id": f"{batch.task.cluster:x}-{record.rid}"}
            await stream.publish(subject, record.payload, headers=headers)

    def close(self) -> None:
        """Close the connection."""
        self._loop.run_until_complete(self._client.close())
        self._loop.close()
