"""The codec: every message round-trips, and anything else is rejected."""

from __future__ import annotations

import functools
import re
from typing import Any, get_args

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from tests.properties import examples
from ziplog import wire
from ziplog.core.entries import Body, Origin, decode_body, encode_body
from ziplog.core.fields import MAX_FRAME, MAX_UNIT_RECORDS
from ziplog.core.message import Message
from ziplog.errors import LocalProtocolError, ProtocolError
from ziplog.wire.node_info import version_of

KINDS: tuple[type[Message], ...] = get_args(wire.AnyMessage)
MAX_ITEMS = 4


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a type, with the ends of every range."""
    match kind:
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.IntType():
            low = kind.ge if kind.ge is not None else -(2**63)
            high = kind.le if kind.le is not None else 2**63 - 1
            if kind.lt is not None:
                high = kind.lt - 1
            return st.integers(low, high) | st.sampled_from([low, high])
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.DictType():
            most = kind.max_length or MAX_ITEMS
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=most)
        case inspect.StrType() if kind.pattern is not None:
            return st.from_regex(re.compile(kind.pattern, re.ASCII), fullmatch=True)
        case inspect.StrType():
            most = min(kind.max_length or 40, 40)
            return st.text(min_size=kind.min_length or 0, max_size=most)
        case inspect.BytesType():
            most = min(kind.max_length or 40, 40)
            return st.binary(min_size=kind.min_length or 0, max_size=most)
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.ListType():
            return lists(kind)
        case inspect.VarTupleType():
            return lists(kind).map(tuple)
        case inspect.UnionType():
            return st.one_of(*(values(one) for one in kind.types))
        case inspect.StructType():
            return st.builds(kind.cls, *(values(field.type) for field in kind.fields))
    raise AssertionError(kind)


def lists(kind: inspect.ListType | inspect.VarTupleType) -> st.SearchStrategy[list[Any]]:
    most = max(min(kind.max_length or MAX_ITEMS, MAX_ITEMS), kind.min_length or 0)
    return st.lists(values(kind.item_type), min_size=kind.min_length or 0, max_size=most)


@functools.cache
def messages_of(kind: type) -> st.SearchStrategy[Any]:
    return values(inspect.type_info(kind))


def plain(thing: Any) -> Any:
    """Return the expected MessagePack value: arrays that start with tags."""
    if isinstance(thing, msgspec.Struct):
        fields = [plain(getattr(thing, name)) for name in thing.__struct_fields__]
        tag = thing.__struct_config__.tag
        return fields if tag is None else [tag, *fields]
    if isinstance(thing, (list, tuple)):
        return [plain(item) for item in thing]
    return thing


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@examples(25)
@given(data=st.data())
def test_message_round_trips(kind: type, data: st.DataObject) -> None:
    message = data.draw(messages_of(kind))
    frame = wire.encode(message)
    assert wire.decode(frame) == message
    assert type(wire.decode(frame)) is kind
    # Another MessagePack implementation reads the same values, and its frames decode here.
    assert msgpack.unpackb(frame) == plain(message)
    assert wire.decode(msgpack.packb(plain(message))) == message


def test_tags_carry_the_version_and_are_all_different() -> None:
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(tags)
    fixed = {wire.NodeInfoQuery, wire.NodeInfo}
    versions = {kind.__struct_config__.tag // 256 for kind in KINDS if kind not in fixed}
    assert versions == {wire.VERSION}


def test_tags_and_fields_in_use_are_unchanged() -> None:
    # New fields are only added at the end: old programs identify fields by position.
    assert KINDS[0].__struct_config__.tag == 257
    assert KINDS[0].__struct_fields__ == (
        "cluster", "shard", "view", "client", "seq", "first_incomplete", "predecessor", "after",
        "count", "body", "copy", "since", "sealed",
    )  # fmt: skip
    assert wire.InsertAck.__struct_config__.tag == 258
    assert wire.InsertAck.__struct_fields__ == (
        "cluster", "shard", "view", "server", "incarnation", "seq", "counter", "confirmed", "gsns",
        "waited", "copy",
    )  # fmt: skip
    assert wire.Refused.__struct_config__.tag == 259
    assert wire.Refused.__struct_fields__ == (
        "cluster", "shard", "view", "server", "request", "code", "detail", "copies", "since",
    )  # fmt: skip
    assert wire.Deliver.__struct_config__.tag == 271
    assert wire.Early.__struct_config__.tag == 279
    assert wire.Early.__struct_fields__ == wire.Deliver.__struct_fields__ == (
        "cluster", "shard", "view", "server", "subscription", "start", "frontier", "units",
        "leases", "stable",
    )  # fmt: skip


@given(st.binary(max_size=200))
def test_random_bytes_are_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(frame)


@examples(300)
@given(data=st.data())
def test_a_damaged_frame_is_a_protocol_error_or_another_message(data: st.DataObject) -> None:
    frame = bytearray(wire.encode(data.draw(messages_of(data.draw(st.sampled_from(KINDS))))))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut])):
        try:
            assert isinstance(wire.decode(damaged), Message)
        except ProtocolError:
            continue


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@examples(10)
@given(data=st.data())
def test_every_limit_of_every_field_is_checked(kind: type, data: st.DataObject) -> None:
    message = plain(data.draw(messages_of(kind)))
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    for index, field in enumerate(info.fields, 1):
        for wrong in wrong_values(field.type):
            changed = [*message[:index], wrong, *message[index + 1 :]]
            with pytest.raises(ProtocolError):
                wire.decode(msgpack.packb(changed))
    required = sum(field.required for field in info.fields)
    with pytest.raises(ProtocolError):
        wire.decode(msgpack.packb(message[:required]))


def wrong_values(kind: inspect.Type) -> list[Any]:
    """Return values just beyond a type's limits, and of other types."""
    match kind:
        case inspect.IntType():
            low = [kind.ge - 1] if kind.ge is not None else []
            high = [kind.le + 1] if kind.le is not None else []
            over = [kind.lt] if kind.lt is not None else []
            return [*low, *high, *over, "1", None, 1.5]
        case inspect.StrType():
            return [b"bytes", 5, *(["x" * (kind.max_length + 1)] if kind.max_length else [])]
        case inspect.BytesType():
            short = [b"x" * (kind.min_length - 1)] if kind.min_length else []
            is_small = kind.max_length is not None and kind.max_length < 2**20
            long = [b"x" * (kind.max_length + 1)] if kind.max_length and is_small else []
            return ["text", 5, *short, *long]
        case inspect.BoolType():
            return [0, None, "true"]
        case inspect.LiteralType():
            return ["no such word", 5, None]
        case inspect.ListType() | inspect.VarTupleType():
            return [5, None, b"", *([[]] if kind.min_length else [])]
    return [{}]


def test_lists_of_gsns_are_bounded() -> None:
    ack = plain(wire.InsertAck(1, 0, 1, 0, 1, 1, 1, False, [1]))
    ack[-3] = list(range(MAX_UNIT_RECORDS))
    wire.decode(msgpack.packb(ack))
    ack[-3] = list(range(MAX_UNIT_RECORDS + 1))
    with pytest.raises(ProtocolError):
        wire.decode(msgpack.packb(ack))


def test_frames_are_bounded_in_both_directions() -> None:
    body = bytes(MAX_FRAME)
    insert = wire.Insert(1, 0, 1, b"c" * 16, 1, 1, 0, 0, 1, body)
    with pytest.raises(LocalProtocolError, match="Insert"):
        wire.encode(insert)
    with pytest.raises(ProtocolError, match="at most"):
        wire.decode(body + b"\0")


@pytest.mark.parametrize("gsn", [2**64, object(), "\udcff"])
def test_a_value_that_no_frame_can_carry_is_a_local_error(gsn: Any) -> None:
    with pytest.raises(LocalProtocolError, match="Read cannot be encoded: "):
        wire.encode(wire.Read(1, 0, 1, 1, gsn))


def test_deeply_nested_input_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        wire.decode(b"\x91" * 100_000)
    with pytest.raises(ProtocolError):
        decode_body(b"\x91" * 100_000, 1)


def test_bytes_after_a_message_are_a_protocol_error() -> None:
    frame = wire.encode(wire.Hello(1, 2))
    with pytest.raises(ProtocolError):
        wire.decode(frame + b"\0")


def test_fields_of_a_later_version_are_ignored() -> None:
    hello = wire.Hello(1, 2)
    assert wire.decode(msgpack.packb([*plain(hello), "a field that comes later"])) == hello


# --- bodies ---

COUNTS = st.integers(0, 2**63 - 1)
ORIGINS = st.none() | st.builds(Origin, st.binary(min_size=16, max_size=16), COUNTS, COUNTS)
KEYS = st.none() | st.binary(max_size=40)


@given(
    timestamp_us=st.integers(-(2**62), 2**62 - 1),
    key=st.none() | st.binary(max_size=40),
    payloads=st.lists(st.binary(max_size=40), min_size=1, max_size=8),
    origin=ORIGINS,
)
def test_body_round_trips(
    timestamp_us: int, key: bytes | None, payloads: list[bytes], origin: Origin | None
) -> None:
    body = Body(timestamp_us, key, payloads, origin)
    data = encode_body(body)
    assert decode_body(data, len(payloads)) == body
    assert msgpack.unpackb(data) == [timestamp_us, key, payloads, origin and plain(origin)]
    # The stored form from before origins.
    assert decode_body(msgpack.packb([timestamp_us, key, payloads]), len(payloads)) == (
        Body(timestamp_us, key, payloads)
    )
    for count in (len(payloads) - 1, len(payloads) + 1):
        with pytest.raises(ProtocolError):
            decode_body(data, count)


@given(st.lists(st.tuples(st.binary(max_size=40), KEYS), min_size=1, max_size=8), ORIGINS)
def test_body_with_keys_round_trips(
    rows: list[tuple[bytes, bytes | None]], origin: Origin | None
) -> None:
    payloads, keys = [payload for payload, _ in rows], [key for _, key in rows]
    body = Body(7, None, payloads, origin, keys)
    data = encode_body(body)
    assert decode_body(data, len(rows)) == body
    assert [body.key_of(index) for index in range(len(rows))] == keys
    assert msgpack.unpackb(data) == [7, None, payloads, origin and plain(origin), keys]


@pytest.mark.parametrize(
    ("key", "keys"),
    [(None, []), (None, [b"k"]), (None, [b"k"] * 3), (b"k", [b"k", b"l"]), (None, [1, 2])],
)
def test_keys_of_the_wrong_number_are_a_protocol_error(
    key: bytes | None, keys: list[bytes]
) -> None:
    with pytest.raises(ProtocolError):
        decode_body(msgpack.packb([0, key, [b"x", b"y"], None, keys]), 2)


@given(st.binary(max_size=100))
def test_random_bytes_are_not_a_body(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_body(data, 1)


def test_an_empty_record_differs_from_none() -> None:
    with pytest.raises(ProtocolError):
        decode_body(msgpack.packb([0, None, []]), 0)
    assert decode_body(msgpack.packb([0, b"", [b""]]), 1) == Body(0, b"", [b""])


def test_the_layout_of_a_nodes_description_never_changes() -> None:
    info = wire.NodeInfo(7, 1, "storage", "s", "c", "0.1", 1, 2, ["h:1"], 2, 99)
    fields = [2, 7, 1, "storage", "s", "c", "0.1", 1, 2, ["h:1"]]
    assert wire.encode(info) == msgpack.packb([*fields, 2, 99])
    # Earlier releases do not send the last fields.
    without_space = msgspec.structs.replace(info, free_bytes=None)
    assert wire.decode(msgpack.packb([*fields, 2])) == without_space
    assert wire.decode(msgpack.packb(fields)) == msgspec.structs.replace(without_space, wire=0)
    assert wire.encode(wire.NodeInfoQuery(7, 1)) == msgpack.packb([1, 7, 1])
    # A later release adds fields at the end, and roles.
    later = msgpack.packb([2, 7, 1, "player", "s", "c", "0.1", 1, 2, ["h:1"], 2, 99, "more"])
    assert wire.decode(later) == msgspec.structs.replace(info, role="player")


@given(st.integers(1, 255), st.integers(0, 255), st.integers(0, 40))
def test_the_version_of_a_message_is_read_without_its_layout(
    version: int, code: int, fields: int
) -> None:
    frame = msgpack.packb([version * 256 + code, *range(fields)])
    assert version_of(frame) == (version if len(frame) >= 6 else None)


@given(st.binary(max_size=40))
def test_any_bytes_may_have_no_version(frame: bytes) -> None:
    assert version_of(frame) in {None, *range(256)}


def test_a_description_has_no_version() -> None:
    assert version_of(wire.encode(wire.NodeInfoQuery(7, 1))) is None
