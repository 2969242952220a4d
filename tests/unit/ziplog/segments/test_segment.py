"""The index of a segment file, rebuilt from the file's bytes."""

from __future__ import annotations

import tracemalloc

from crc32c import crc32c

from shard.storage.segment_files import new_segment_after
from ziplog.core.entries import Body, Place, encode_body
from ziplog.segments.entry import Entry
from ziplog.segments.entry_codec import encode_run


def test_a_rebuild_takes_little_memory_besides_the_bytes_of_the_file() -> None:
    segment = new_segment_after(None, 1, 1)
    body = encode_body(Body(0, None, [bytes(40)]))
    entries = [
        Entry(number, 1, Place(bytes(16), number, 1, 0, [number], crc32c(body), body))
        for number in range(1, 5_001)
    ]
    buffers, _ = encode_run(entries, segment.salt, 1, 0, 1 << 30, 0, 0)
    data = b"".join(buffers)
    tracemalloc.start()
    segment.rebuild(data, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert segment.last_fseq == 5_000
    assert peak < len(data)
