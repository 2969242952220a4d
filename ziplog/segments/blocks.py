"""Blocks: a columnar index of the records in a stretch of a shard's log, for bulk reads.

A *block* covers the positions [start, stop). It has the bytes with the records (about 4 MiB of a
segment, or the bodies of units), and columns: little-endian, padded to 8 bytes. The columns are
gsns, epochs, timestamps, the bounds of payloads in the bytes and, if any record has a key, the
bounds of keys with a bitmap. Bounds alternate start and end: as the offsets of a variable-length
array of 2n - 1 elements, the even elements are the payloads.

The records of a unit are never searched one by one: their bounds are computed from their lengths.
Invariant: bounds enclose exactly what decoding the unit gives (docs/protocol.md, section 14.1).
"""

from __future__ import annotations

import sys
from array import array
from itertools import accumulate, repeat
from operator import add, is_not, mul, sub
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from ziplog.core.entries import Origin, Place, decode_body, encode_body
from ziplog.core.fields import MAX_FRAME
from ziplog.segments.entry import UnreadableError
from ziplog.segments.entry_codec import DAMAGED, EXPIRE, PLACE, decode, walk

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ziplog.core.entries import Body, Unit

#: A block ends after the entry with which it reaches this size, in bytes.
BLOCK_BYTES: Final = 4 * 1024 * 1024
#: Maximum size of a block, in bytes; this much data contains a whole block, unless it is damaged.
MAX_BLOCK_BYTES: Final = BLOCK_BYTES + 4 * MAX_FRAME

#: Size of a payload's MessagePack header, by payload length; the last value is for longer ones.
_HEADER: Final = bytes([2]) * 0x100 + bytes([3]) * 0xFF00 + bytes([5])
_LONG: Final = 0x10000
#: First byte of a body with three fields, the format from before origins.
_THREE: Final = b"\x93"
#: An array of fewer items has a header of one byte.
_SHORT_ARRAY: Final = 16
_encode: Final = msgspec.msgpack.Encoder().encode

Buffer = bytes | bytearray | memoryview


class OriginRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` records of a block from index `at` on; `origin` is that of the first one."""

    at: int
    count: int
    origin: Origin


class Block(msgspec.Struct, frozen=True):
    """The records of a shard at positions [start, stop); its other positions there are no-ops."""

    start: int
    stop: int
    #: Number of records.
    rows: int
    #: Whether any record has a key.
    has_keys: bool
    #: See `layout`.
    columns: Buffer
    #: The bytes that the bounds refer to.
    data: Buffer
    #: In order; the records that are in no run have no origin.
    origins: list[OriginRun]


class ColumnLayout(NamedTuple):
    """The places of the columns in `Block.columns`."""

    #: 64-bit integers.
    gsns: slice
    epochs: slice
    timestamps: slice
    #: Start and end of each payload in `Block.data`, 2 x 32 bits.
    values: slice
    #: The same for keys, and a bitmap of the records with a key, lowest bit first; empty without.
    keys: slice
    key_bits: slice
    #: Size of all columns, in bytes.
    size: int


def layout(rows: int, *, has_keys: bool) -> ColumnLayout:
    """Return the column layout of a block with `rows` records."""
    ends = [8 * rows * count for count in range(5)]
    gsns, epochs, timestamps, values = map(slice, ends[:-1], ends[1:])
    size = ends[-1]
    if not has_keys:
        return ColumnLayout(
            gsns, epochs, timestamps, values, slice(size, size), slice(size, size), size
        )
    bits = size + 8 * rows
    keys, key_bits = slice(size, bits), slice(bits, bits + (rows + 7) // 8)
    return ColumnLayout(
        gsns, epochs, timestamps, values, keys, key_bits, bits + (rows + 63) // 64 * 8
    )


def block_of_units(units: Iterable[Unit], start: int, stop: int) -> Block:
    """Return the block of a shard's units, which lie in [start, stop) or reach over its ends.

    Raises:
        ProtocolError: a unit's body is malformed.

    """
    builder = _Builder()
    bodies: list[bytes] = []
    at = 0
    for unit in units:
        builder.add(unit.epoch, unit.gsns, unit.body, at)
        bodies.append(unit.body)
        at += len(unit.body)
    return builder.block(start, stop, b"".join(bodies))


class BlockCut(NamedTuple):
    """The next block of a segment, its size, and its last entry."""

    #: None: its entries hold no position.
    block: Block | None
    #: Size in the segment, in bytes.
    size: int
    #: Number of the last entry.
    last_fseq: int


def cut_block(
    data: bytes, salt: int, start: int, last_fseq: int, name: str, *, is_end: bool
) -> BlockCut | None:
    """Return the first block of a segment's bytes; None if it does not end in them.

    Args:
        data: bytes of the segment, from the start of an entry on.
        salt: the segment's salt.
        start: the first position of the block; 0: the position of its first entry.
        last_fseq: the number of the entry before; -1: any.
        name: the segment's name.
        is_end: `data` reaches to the segment's end, or has more than `MAX_BLOCK_BYTES`.

    Raises:
        UnreadableError: an entry is damaged or missing.
        ProtocolError: a unit's body is malformed.

    """
    builder = _Builder()
    stop = size = 0
    for found in walk(data, salt):
        if not found.is_whole or found.kind == DAMAGED:
            if not is_end:
                return None
            raise UnreadableError(f"{name} is damaged after entry {last_fseq}")
        size = found.stop
        if not found.is_numbered:
            continue
        if last_fseq not in {found.fseq - 1, -1}:
            raise UnreadableError(f"{name} lacks the entry after {last_fseq}")
        last_fseq = found.fseq
        if found.kind == EXPIRE:
            continue
        start, stop = start or found.first, found.last + 1
        if found.kind == PLACE:
            place = decode(data, found, name).decision
            assert isinstance(place, Place), "the header has the kind"
            assert place.body is not None, "the store keeps bodies"
            at = found.stop - len(place.body)
            assert data.endswith(place.body, at, found.stop), "a body comes last in its entry"
            builder.add(place.epoch, place.gsns, place.body, at)
        if size >= BLOCK_BYTES:
            break
    else:
        if not is_end:
            return None
    block = builder.block(start, stop, memoryview(data)[:size]) if stop else None
    return BlockCut(block, size, last_fseq)


class _Builder:
    """Builds the columns of one block."""

    def __init__(self) -> None:
        assert sys.byteorder == "little", "columns are little-endian"
        self._gsns, self._epochs, self._timestamps = array("q"), array("q"), array("q")
        self._values, self._keys = array("i"), array("i")
        #: One digit per record: 1 if it has a key.
        self._has_key = bytearray()
        self._origins: list[OriginRun] = []

    def add(self, epoch: int, gsns: Sequence[int], body: bytes, at: int) -> None:
        """Add the next unit, with its encoded body at offset `at`."""
        count = len(gsns)
        contents = decode_body(body, count)
        values, keys = _bounds(body, contents, at)
        if contents.origin is not None:
            self._add_origin(contents.origin, count)
        self._gsns.extend(gsns)
        self._epochs.extend(array("q", (epoch,)) * count)
        self._timestamps.extend(array("q", (contents.timestamp_us,)) * count)
        self._values.extend(values)
        self._keys.extend(keys)
        if contents.keys is not None:
            self._has_key += bytes(map(b"01".__getitem__, _key_presence(contents.keys)))
        else:
            self._has_key += (b"0" if contents.key is None else b"1") * count

    def _add_origin(self, origin: Origin, count: int) -> None:
        at = len(self._gsns)
        if self._origins:
            last = self._origins[-1]
            expected = Origin(last.origin.writer, last.origin.batch, last.origin.row + last.count)
            if last.at + last.count == at and expected == origin:
                self._origins[-1] = OriginRun(last.at, last.count + count, last.origin)
                return
        self._origins.append(OriginRun(at, count, origin))

    def block(self, start: int, stop: int, data: Buffer) -> Block:
        """Return the block of the added units."""
        rows = len(self._gsns)
        has_keys = b"1" in self._has_key
        columns = [self._gsns, self._epochs, self._timestamps, self._values]
        parts = [column.tobytes() for column in columns]
        if has_keys:
            # The last digit of a number is its lowest bit.
            bits = int(self._has_key[::-1], 2)
            parts += [self._keys.tobytes(), bits.to_bytes((rows + 63) // 64 * 8, "little")]
        return Block(start, stop, rows, has_keys, b"".join(parts), data, self._origins)


def _bounds(body: bytes, contents: Body, at: int) -> tuple[array[int], array[int]]:
    """Return the bounds of the payloads and of the keys; the body is at offset `at`."""
    encoded = encode_body(contents)
    origin, keys, payloads = contents.origin, contents.keys, contents.payloads
    if encoded == body:
        trailing = 1 if origin is None else len(_encode(origin))
        end = len(body) - trailing - (0 if keys is None else len(_encode(keys)))
    elif origin is None and body[:1] == _THREE and encoded[1:-1] == body[1:]:
        end = len(body)
    else:
        return _searched_bounds(body, contents, at)
    values = _bounds_ending_at(list(map(len, payloads)), at + end)
    if keys is not None:
        return values, _bounds_of_keys(keys, at + len(body))
    if contents.key is None:
        return values, array("i", (0, 0)) * len(payloads)
    # The body has the key, then the header of the array of payloads, then the payloads.
    before = _HEADER[min(len(payloads[0]), _LONG)] + (1 if len(payloads) < _SHORT_ARRAY else 3)
    stop = values[0] - before
    return values, array("i", (stop - len(contents.key), stop)) * len(payloads)


def _bounds_ending_at(lengths: list[int], end: int) -> array[int]:
    """Return the bounds of byte strings that are encoded one after the other up to `end`."""
    shortest, longest = min(lengths), max(lengths)
    header = _HEADER[min(shortest, _LONG)]
    if header != _HEADER[min(longest, _LONG)]:
        headers = map(_HEADER.__getitem__, map(min, lengths, repeat(_LONG)))
        return _bounds_with_headers(headers, lengths, end)
    if shortest != longest:
        return _bounds_with_headers(repeat(header), lengths, end)
    if len(lengths) == 1:
        return array("i", (end - longest, end))
    step = header + longest
    before = end - step * len(lengths)
    bounds = array("i", bytes(8 * len(lengths)))
    bounds[::2] = array("i", range(before + header, end + 1, step))
    bounds[1::2] = array("i", range(before + step, end + 1, step))
    return bounds


def _bounds_with_headers(headers: Iterable[int], lengths: list[int], end: int) -> array[int]:
    """Return the same bounds, given the size of each header."""
    ends = list(accumulate(map(add, lengths, headers)))
    bounds = array("i", bytes(8 * len(ends)))
    bounds[1::2] = array("i", map((end - ends[-1]).__add__, ends))
    bounds[::2] = array("i", map(sub, bounds[1::2], lengths))
    return bounds


def _key_presence(keys: list[bytes | None]) -> Iterable[bool]:
    """Return for each record whether it has a key."""
    return map(is_not, keys, repeat(None))


def _bounds_of_keys(keys: list[bytes | None], end: int) -> array[int]:
    """Return the bounds of keys that are encoded one after the other up to `end`."""
    if None not in keys:
        return _bounds_ending_at(list(map(len, keys)), end)  # type: ignore[arg-type]
    # An absent key is encoded as one byte, and has the bounds 0, 0.
    lengths = [len(key or b"") for key in keys]
    headers = [1 if key is None else _HEADER[min(len(key), _LONG)] for key in keys]
    bounds = _bounds_with_headers(headers, lengths, end)
    for half in (slice(0, None, 2), slice(1, None, 2)):
        bounds[half] = array("i", map(mul, bounds[half], _key_presence(keys)))
    return bounds


def _searched_bounds(body: bytes, contents: Body, at: int) -> tuple[array[int], array[int]]:
    """Return the bounds in a body with another encoding than ours, by a search for the bytes.

    The search may find other, equal bytes, which is as good.
    """
    values, keys = array("i"), array("i")
    end = 0
    for index, payload in enumerate(contents.payloads):
        start = body.find(payload, end)
        end = start + len(payload)
        assert start >= 0, "a decoded payload is in the body"
        values.extend((at + start, at + end))
        key = contents.key_of(index)
        if key is None:
            keys.extend((0, 0))
        else:
            start = at + body.find(key)
            keys.extend((start, start + len(key)))
    return values, keys
