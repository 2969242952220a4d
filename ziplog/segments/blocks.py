"""Where the records of a stretch of a shard's log are: columns of fixed width beside their bytes.

A *block* is a stretch [start, stop) of positions: the bytes that hold it (of a segment, about 4
MiB, or the bodies of units), and columns, little-endian, each padded to 8 bytes: gsns, epochs,
timestamps, the bounds of payloads in the bytes and, if any record has one, those of keys with a
bitmap. Bounds are start and end, in turn: as the offsets of a variable-length array of 2n - 1
elements, the payloads are its even ones.

Rule: a unit's records are never looked at one by one; where they are follows from their lengths.
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

#: A block ends behind the first entry with which it has so many bytes.
BLOCK_BYTES: Final = 4 * 1024 * 1024
#: In so many bytes there is a block, or damage: they hold more than one entry.
MAX_BLOCK_BYTES: Final = BLOCK_BYTES + 4 * MAX_FRAME

#: MessagePack's header of a payload, by its length; the last one is for all longer ones.
_HEADER: Final = bytes([2]) * 0x100 + bytes([3]) * 0xFF00 + bytes([5])
_LONG: Final = 0x10000
#: How a body of three fields begins, as they were before there were origins.
_THREE: Final = b"\x93"
#: An array of fewer has a header of one byte.
_SHORT_ARRAY: Final = 16
_encode: Final = msgspec.msgpack.Encoder().encode

Buffer = bytes | bytearray | memoryview


class OriginRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` records of a block from index `at` on, and where they are from (the first one)."""

    at: int
    count: int
    origin: Origin


class Block(msgspec.Struct, frozen=True):
    """The records of a shard at positions [start, stop); all else that it owns there are no-ops."""

    start: int
    stop: int
    #: How many records.
    rows: int
    #: Whether any of them has a key.
    has_keys: bool
    #: See `layout`.
    columns: Buffer
    #: What the bounds are about.
    data: Buffer
    #: Of the records that have one, in order; all others have none.
    origins: list[OriginRun]


class ColumnLayout(NamedTuple):
    """Where the columns of a block are in `Block.columns`."""

    #: 64-bit integers.
    gsns: slice
    epochs: slice
    timestamps: slice
    #: Start and end of each payload in `Block.data`, 2 x 32 bits.
    values: slice
    #: The same of keys, and a bit for each record that has one, least first; empty without keys.
    keys: slice
    key_bits: slice
    #: Bytes of all columns.
    size: int


def layout(rows: int, *, has_keys: bool) -> ColumnLayout:
    """Return where the columns of `rows` records are."""
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
    """Return the block of a shard's units, which are all in [start, stop), or reach over its ends.

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
    """The next block of a segment, and what was learnt of the entries in it."""

    #: None: no entry in it is about a position.
    block: Block | None
    #: Bytes of the segment that it takes.
    size: int
    #: The last entry in it.
    last_fseq: int


def cut_block(
    data: bytes, salt: int, start: int, last_fseq: int, name: str, *, is_end: bool
) -> BlockCut | None:
    """Return the first block of `data`, a segment's bytes from where an entry begins; None: more.

    Args:
        data: of the segment; `is_end`: up to its end, or more than `MAX_BLOCK_BYTES`.
        salt: the segment's.
        start: the position that the block begins with; 0: that of its first entry.
        last_fseq: the number of the entry before; -1: any.
        name: of the segment.
        is_end: there is no more.

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
            raise UnreadableError(f"{name} is damaged behind entry {last_fseq}")
        size = found.stop
        if not found.is_numbered:
            continue
        if last_fseq not in {found.fseq - 1, -1}:
            raise UnreadableError(f"{name} misses the entry after {last_fseq}")
        last_fseq = found.fseq
        if found.kind == EXPIRE:
            continue
        start, stop = start or found.first, found.last + 1
        if found.kind == PLACE:
            place = decode(data, found, name).decision
            assert isinstance(place, Place), "the header tells the kind"
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
    """Gathers the columns of one block."""

    def __init__(self) -> None:
        assert sys.byteorder == "little", "columns are little-endian"
        self._gsns, self._epochs, self._timestamps = array("q"), array("q"), array("q")
        self._values, self._keys = array("i"), array("i")
        #: A digit for each record: whether it has a key.
        self._has_key = bytearray()
        self._origins: list[OriginRun] = []

    def add(self, epoch: int, gsns: Sequence[int], body: bytes, at: int) -> None:
        """Take the next unit, whose encoded body begins at `at`."""
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
            self._has_key += bytes(map(b"01".__getitem__, _have(contents.keys)))
        else:
            self._has_key += (b"0" if contents.key is None else b"1") * count

    def _add_origin(self, origin: Origin, count: int) -> None:
        at = len(self._gsns)
        if self._origins:
            last = self._origins[-1]
            goes_on = Origin(last.origin.writer, last.origin.batch, last.origin.row + last.count)
            if last.at + last.count == at and goes_on == origin:
                self._origins[-1] = OriginRun(last.at, last.count + count, last.origin)
                return
        self._origins.append(OriginRun(at, count, origin))

    def block(self, start: int, stop: int, data: Buffer) -> Block:
        """Return the block of what was taken."""
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
    """Return start and end of each payload in turn, and the same of keys; the body is at `at`."""
    encoded = encode_body(contents)
    origin, keys, payloads = contents.origin, contents.keys, contents.payloads
    if encoded == body:
        behind = 1 if origin is None else len(_encode(origin))
        end = len(body) - behind - (0 if keys is None else len(_encode(keys)))
    elif origin is None and body[:1] == _THREE and encoded[1:-1] == body[1:]:
        end = len(body)
    else:
        return _searched(body, contents, at)
    values = _ending(list(map(len, payloads)), at + end)
    if keys is not None:
        return values, _bounds_of_keys(keys, at + len(body))
    if contents.key is None:
        return values, array("i", (0, 0)) * len(payloads)
    # Before the payloads there is the header of their array, and the key before that.
    before = _HEADER[min(len(payloads[0]), _LONG)] + (1 if len(payloads) < _SHORT_ARRAY else 3)
    stop = values[0] - before
    return values, array("i", (stop - len(contents.key), stop)) * len(payloads)


def _ending(lengths: list[int], end: int) -> array[int]:
    """Return start and end, in turn, of what is encoded one after the other up to `end`."""
    shortest, longest = min(lengths), max(lengths)
    header = _HEADER[min(shortest, _LONG)]
    if header != _HEADER[min(longest, _LONG)]:
        return _ending_of(map(_HEADER.__getitem__, map(min, lengths, repeat(_LONG))), lengths, end)
    if shortest != longest:
        return _ending_of(repeat(header), lengths, end)
    if len(lengths) == 1:
        return array("i", (end - longest, end))
    step = header + longest
    before = end - step * len(lengths)
    bounds = array("i", bytes(8 * len(lengths)))
    bounds[::2] = array("i", range(before + header, end + 1, step))
    bounds[1::2] = array("i", range(before + step, end + 1, step))
    return bounds


def _ending_of(headers: Iterable[int], lengths: list[int], end: int) -> array[int]:
    """Return the same of what has these headers, in bytes."""
    ends = list(accumulate(map(add, lengths, headers)))
    bounds = array("i", bytes(8 * len(ends)))
    bounds[1::2] = array("i", map((end - ends[-1]).__add__, ends))
    bounds[::2] = array("i", map(sub, bounds[1::2], lengths))
    return bounds


def _have(keys: list[bytes | None]) -> Iterable[bool]:
    """Return of each record whether it has a key."""
    return map(is_not, keys, repeat(None))


def _bounds_of_keys(keys: list[bytes | None], end: int) -> array[int]:
    """Return the bounds of keys that are encoded one after the other up to `end`."""
    if None not in keys:
        return _ending(list(map(len, keys)), end)  # type: ignore[arg-type]
    # What is none is one byte, and has no bounds.
    lengths = [len(key or b"") for key in keys]
    headers = [1 if key is None else _HEADER[min(len(key), _LONG)] for key in keys]
    bounds = _ending_of(headers, lengths, end)
    for half in (slice(0, None, 2), slice(1, None, 2)):
        bounds[half] = array("i", map(mul, bounds[half], _have(keys)))
    return bounds


def _searched(body: bytes, contents: Body, at: int) -> tuple[array[int], array[int]]:
    """Return the same of a body that is encoded in another way than ours.

    Something else that is equal may be found. What counts is the contents.
    """
    values, keys = array("i"), array("i")
    end = 0
    for index, payload in enumerate(contents.payloads):
        start = body.find(payload, end)
        end = start + len(payload)
        assert start >= 0, "what was decoded is there"
        values.extend((at + start, at + end))
        key = contents.key_of(index)
        if key is None:
            keys.extend((0, 0))
        else:
            start = at + body.find(key)
            keys.extend((start, start + len(key)))
    return values, keys
