"""Frames from a stream of bytes, whatever its pieces."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ziplog.core.fields import MAX_FRAME
from ziplog.errors import ProtocolError
from ziplog.runtime.connection import GREETING, LENGTH_BYTES, Connection, pack_length


def read(data: bytes, cuts: list[int]) -> tuple[Connection, list[bytes]]:
    """Parse `data` in pieces that end at `cuts`."""
    connection, frames = Connection(b"\0peer"), deque[bytes]()
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    for start, end in zip([0, *ends], ends, strict=False):
        connection.parse(memoryview(data)[start:end], frames)
    return connection, list(frames)


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(0, 2000)), st.integers(0, 43))
def test_frames_are_the_same_in_any_pieces(
    frames: list[bytes], cuts: list[int], missing: int
) -> None:
    stream = b"".join(pack_length(len(frame)) + frame for frame in frames)
    missing = min(missing, LENGTH_BYTES + len(frames[-1]) - 1 if frames else 0)
    connection, found = read(GREETING + stream[: len(stream) - missing], cuts)
    assert found == (frames[:-1] if missing else frames)
    assert connection.is_greeted
    assert connection.is_between_frames == (connection.held_bytes == 0)
    if missing:
        assert connection.held_bytes == LENGTH_BYTES + len(frames[-1]) - missing


@example(b"z\0", [1])
@given(st.binary(max_size=len(GREETING)), st.lists(st.integers(0, 20)))
def test_only_the_greeting_is_a_greeting(data: bytes, cuts: list[int]) -> None:
    if GREETING.startswith(data):
        connection, found = read(data, cuts)
        assert (found, connection.is_greeted) == ([], data == GREETING)
    else:
        with pytest.raises(ProtocolError, match="does not speak this protocol"):
            read(data, cuts)


@given(st.integers(MAX_FRAME + 1, 2**32 - 1), st.lists(st.integers(0, 20)))
def test_length_above_the_limit_is_refused_before_the_frame_comes(
    size: int, cuts: list[int]
) -> None:
    with pytest.raises(ProtocolError, match=str(size)):
        read(GREETING + pack_length(size), cuts)
