"""What an archive is asked and answers: what was encoded comes out, and no more is believed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziplog.runtime.archive_messages import (
    ANSWER_BYTES,
    BLOCK,
    LOCATE,
    LOCATED,
    NEXT,
    REQUEST_BYTES,
    STRANGER,
    WRITERS,
    Answer,
    Place,
    Request,
    decode_answer,
    decode_place,
    decode_request,
    encode_answer,
    encode_place,
    encode_request,
)
from ziplog.segments.rowfile import Part
from ziplog.segments.rows import MOST_BYTES, layout

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1024 * 1024
WIDE = st.integers(0, 2**64 - 1)
NARROW = st.integers(0, 2**32 - 1)

requests = st.builds(Request, st.sampled_from([BLOCK, WRITERS, LOCATE]), WIDE, NARROW, WIDE)
places = st.builds(
    Place, WIDE, WIDE, st.binary(max_size=200).map(
        lambda name: "/" + name.replace(b"\0", b"").decode(errors="surrogateescape"))
)  # fmt: skip


@st.composite
def blocks(draw: st.DrawFn) -> Answer:
    """Answers that are about a block: it itself, or where it is."""
    start = draw(st.integers(0, 2**63 - 2))
    rows, has_keys = draw(st.integers(0, 100_000)), draw(st.booleans())
    parts = (
        layout(rows, has_keys=has_keys).size,
        draw(st.integers(0, 64 * MIB)),
        draw(st.integers(2 * rows, MOST_BYTES)),
    )
    kind = draw(st.sampled_from([BLOCK, LOCATED]))
    return Answer(
        kind, start, draw(st.integers(start + 1, 2**63 - 1)), rows, has_keys,
        *(Part(0, size, draw(NARROW)) for size in parts),  # type: ignore[arg-type]
        draw(st.integers(0, 16 + 4095)) if kind == LOCATED else 0,  # type: ignore[arg-type]
    )  # fmt: skip


others = st.builds(
    lambda kind, at, size, crc: Answer(kind, at, columns=Part(0, size, crc)),
    st.sampled_from([WRITERS, NEXT, STRANGER]), WIDE, st.integers(0, 64 * MIB), NARROW,
)  # fmt: skip


@given(requests)
def test_a_request_is_what_was_asked(request: Request) -> None:
    content = encode_request(request)
    assert len(content) == REQUEST_BYTES
    assert decode_request(content) == request


@given(blocks() | others)
def test_an_answer_is_what_was_answered(answer: Answer) -> None:
    content = encode_answer(answer)
    assert len(content) == ANSWER_BYTES
    assert decode_answer(content) == answer


@given(places)
def test_a_place_is_what_was_told(place: Place) -> None:
    assert decode_place(encode_place(place)) == place


@given(st.binary(max_size=300))
def test_any_bytes_are_a_place_or_none(content: bytes) -> None:
    place = decode_place(content)
    assert place is None or encode_place(place) == content


def changed(content: bytes, at: int, put: bytes) -> bytes:
    at %= len(content)
    return (content[:at] + put + content[at + len(put) :])[: len(content)]


@given(requests, st.integers(0, 2**16), st.binary(min_size=1, max_size=12))
def test_a_damaged_request_is_another_one_or_none(request: Request, at: int, put: bytes) -> None:
    content = changed(encode_request(request), at, put)
    found = decode_request(content)
    assert found is None or encode_request(found) == content


@given(blocks() | others, st.integers(0, 2**16), st.binary(min_size=1, max_size=12))
def test_what_follows_an_answer_is_bounded(answer: Answer, at: int, put: bytes) -> None:
    content = changed(encode_answer(answer), at, put)
    found = decode_answer(content)
    if found is None:
        return
    assert encode_answer(found) == content
    if found.kind == LOCATED:
        assert found.size <= 16 + 4095
    # Each record takes two bytes of data, and 40 of columns and a bit.
    assert found.data.size <= MOST_BYTES
    assert found.columns.size <= max(64 * MIB, 21 * MOST_BYTES)
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
        lambda a: a._replace(data=Part(0, MOST_BYTES + 1, 2)),
        lambda a: a._replace(origins=Part(0, 64 * MIB + 1, 2)),
        lambda a: a._replace(place_size=1),  # where there is none
        lambda a: a._replace(kind=LOCATED, place_size=16 + 4096),
        lambda a: a._replace(kind=WRITERS),
        lambda a: Answer(WRITERS, a.start, columns=Part(0, 64 * MIB + 1, 2)),
    ],
)
def test_what_cannot_be_is_no_answer(spoil: Callable[[Answer], Answer]) -> None:
    assert decode_answer(encode_answer(GOOD)) == GOOD
    assert decode_answer(encode_answer(spoil(GOOD))) is None


@pytest.mark.parametrize("path", ["relative/1.seg", "", "/with\0zero"])
def test_what_is_no_absolute_path_is_no_place(path: str) -> None:
    assert decode_place(encode_place(Place(1, 2, path))) is None
    assert decode_place(b"short") is None


@pytest.mark.parametrize("kind", [0, NEXT, STRANGER, LOCATED, 255])
def test_what_cannot_be_asked_is_no_request(kind: int) -> None:
    assert decode_request(encode_request(Request(kind, 7, 3, 5))) is None
