"""The codec of archive messages: it round-trips, and rejects anything else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziplog.archive.messages import (
    ANSWER_BYTES,
    BLOCK,
    LOCATE,
    LOCATED,
    MAX_PLACES,
    NEXT,
    REQUEST_BYTES,
    WRITERS,
    WRONG_SHARD,
    Answer,
    Places,
    Request,
    decode_answer,
    decode_places,
    decode_request,
    encode_answer,
    encode_places,
    encode_request,
)
from ziplog.segments.block_file import BlockIndex, Part
from ziplog.segments.blocks import MAX_BLOCK_BYTES, layout

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1024 * 1024
WIDE = st.integers(0, 2**64 - 1)
NARROW = st.integers(0, 2**32 - 1)

requests = st.builds(Request, st.sampled_from([BLOCK, WRITERS, LOCATE]), WIDE, NARROW, WIDE)
#: Maximum size of encoded places.
MOST_TELLING = 4096 + 96 * MAX_PLACES


@st.composite
def blocks(draw: st.DrawFn, start: int | None = None) -> BlockIndex:
    """A valid block somewhere in a segment."""
    begin = draw(st.integers(1, 2**62)) if start is None else start
    rows, has_keys = draw(st.integers(0, 100_000)), draw(st.booleans())
    sizes = (
        draw(st.integers(2 * rows, MAX_BLOCK_BYTES)),
        layout(rows, has_keys=has_keys).size,
        draw(st.integers(0, 64 * MIB)),
    )
    return BlockIndex(
        begin, draw(st.integers(begin + 1, 2**63 - 1)), rows, has_keys,
        *(Part(draw(WIDE), size, draw(NARROW)) for size in sizes),
    )  # fmt: skip


@st.composite
def places(draw: st.DrawFn) -> Places:
    """Consecutive blocks anywhere in a segment."""
    found: list[BlockIndex] = []
    for _ in range(draw(st.integers(1, MAX_PLACES))):
        stop = found[-1].stop if found else 1
        if stop > 2**62:
            break
        found.append(draw(blocks(stop)))
    return Places(b"/" + draw(st.binary(max_size=4094)).replace(b"\0", b""), found)


def about(block: BlockIndex) -> Answer:
    """Return an answer with a block."""
    parts = [Part(0, part.size, part.crc) for part in (block.columns, block.origins, block.data)]
    return Answer(BLOCK, block.start, block.stop, block.rows, block.has_keys, *parts)


answers = (
    st.builds(about, blocks())
    | st.builds(lambda size: Answer(LOCATED, places_size=size), st.integers(0, MOST_TELLING))
    | st.builds(
        lambda kind, at, size, crc: Answer(kind, at, columns=Part(0, size, crc)),
        st.sampled_from([WRITERS, NEXT, WRONG_SHARD]), WIDE, st.integers(0, 64 * MIB), NARROW,
    )
)  # fmt: skip


@given(requests)
def test_request_round_trips(request: Request) -> None:
    content = encode_request(request)
    assert len(content) == REQUEST_BYTES
    assert decode_request(content) == request


@given(answers)
def test_answer_round_trips(answer: Answer) -> None:
    content = encode_answer(answer)
    assert len(content) == ANSWER_BYTES
    assert decode_answer(content) == answer


@given(places())
def test_places_round_trip(told: Places) -> None:
    content = encode_places(told)
    assert len(content) <= MOST_TELLING
    assert decode_places(content) == told


@given(st.binary(max_size=300))
def test_any_bytes_decode_to_places_or_none(content: bytes) -> None:
    found = decode_places(content)
    assert found is None or decode_places(encode_places(found)) == found


def test_deeply_nested_input_is_not_places() -> None:
    tower = b"\x93\xc4\x01/\x90" + b"\x91" * 5000 + b"\xc0"
    assert decode_places(tower) is None


@pytest.mark.parametrize("count", [0, MAX_PLACES + 1])
def test_places_hold_one_block_up_to_the_maximum(count: int) -> None:
    row = [msgspec.structs.replace(PLACED, start=at, stop=at + 1) for at in range(1, count + 1)]
    assert decode_places(encode_places(Places(b"/1.seg", row))) is None
    assert decode_places(encode_places(Places(b"/1.seg", [PLACED]))) is not None


def changed(content: bytes, at: int, put: bytes) -> bytes:
    at %= len(content)
    return (content[:at] + put + content[at + len(put) :])[: len(content)]


@given(requests, st.integers(0, 2**16), st.binary(min_size=1, max_size=12))
def test_damaged_request_is_another_one_or_none(request: Request, at: int, put: bytes) -> None:
    content = changed(encode_request(request), at, put)
    found = decode_request(content)
    assert found is None or encode_request(found) == content


@given(answers, st.integers(0, 2**16), st.binary(min_size=1, max_size=12))
def test_size_after_an_answer_header_is_bounded(answer: Answer, at: int, put: bytes) -> None:
    content = changed(encode_answer(answer), at, put)
    found = decode_answer(content)
    if found is None:
        return
    assert encode_answer(found) == content
    if found.kind == LOCATED:
        assert found.size <= MOST_TELLING
    # Each record takes two bytes of data, and 40 of columns and a bit.
    assert found.data.size <= MAX_BLOCK_BYTES
    assert found.columns.size <= max(64 * MIB, 21 * MAX_BLOCK_BYTES)
    assert found.origins.size <= 64 * MIB


GOOD = Answer(
    BLOCK, 5, 9, 3, has_keys=False,
    columns=Part(0, layout(3, has_keys=False).size, 1), data=Part(0, 30, 2),
)  # fmt: skip


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: a._replace(kind=LOCATE),  # a question
        lambda a: a._replace(kind=7),
        lambda a: a._replace(stop=a.start),
        lambda a: a._replace(stop=2**63),
        lambda a: a._replace(rows=4),
        lambda a: a._replace(has_keys=True),
        lambda a: a._replace(
            has_keys=2, columns=Part(0, layout(3, has_keys=True).size, 1)
        ),  # neither yes nor no
        lambda a: a._replace(data=Part(0, 5, 2)),  # too few for three records
        lambda a: a._replace(data=Part(0, MAX_BLOCK_BYTES + 1, 2)),
        lambda a: a._replace(origins=Part(0, 64 * MIB + 1, 2)),
        lambda a: a._replace(places_size=1),  # where there are none
        lambda a: a._replace(kind=LOCATED, places_size=9),  # where one is, and the block too
        lambda _: Answer(LOCATED, places_size=MOST_TELLING + 1),
        lambda a: a._replace(start=0),
        lambda a: a._replace(kind=WRITERS),
        lambda a: Answer(WRITERS, a.start, columns=Part(0, 64 * MIB + 1, 2)),
    ],
)
def test_impossible_answer_is_rejected(spoil: Callable[[Answer], Answer]) -> None:
    assert decode_answer(encode_answer(GOOD)) == GOOD
    assert decode_answer(encode_answer(spoil(GOOD))) is None


DATA, COLUMNS, NOTHING = Part(5, 30, 2), Part(7, layout(3, has_keys=False).size, 1), Part(9, 0, 0)
PLACED = BlockIndex(5, 9, 3, False, DATA, COLUMNS, NOTHING)


def test_valid_places_are_accepted() -> None:
    places = Places(b"/log/1.seg", [PLACED, msgspec.structs.replace(PLACED, start=9, stop=11)])
    assert decode_places(encode_places(places)) == places


@pytest.mark.parametrize("path", [b"relative/1.seg", b"1.seg", b"", b"/with\0zero"])
def test_relative_path_is_rejected(path: bytes) -> None:
    assert decode_places(encode_places(Places(path, [PLACED]))) is None


@pytest.mark.parametrize("start", [8, 10])
def test_blocks_with_a_gap_are_rejected(start: int) -> None:
    behind = msgspec.structs.replace(PLACED, start=start, stop=11)
    assert decode_places(encode_places(Places(b"/1.seg", [PLACED, behind]))) is None


@pytest.mark.parametrize(
    "change",
    [
        {"stop": 5}, {"start": -1}, {"start": 0}, {"stop": 2**63}, {"rows": 4}, {"rows": -1},
        {"has_keys": True}, {"data": Part(5, 5, 2)}, {"data": Part(5, MAX_BLOCK_BYTES + 1, 2)},
        {"origins": Part(9, 64 * MIB + 1, 0)},
    ],
)  # fmt: skip
def test_impossible_block_is_rejected(change: dict[str, Any]) -> None:
    block = msgspec.structs.replace(PLACED, **change)
    assert decode_places(encode_places(Places(b"/1.seg", [block]))) is None


@pytest.mark.parametrize("kind", [0, NEXT, WRONG_SHARD, LOCATED, 255])
def test_unknown_request_is_rejected(kind: int) -> None:
    assert decode_request(encode_request(Request(kind, 7, 3, 5))) is None
