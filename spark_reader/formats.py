"""The formats of files that a range of the log is written to, and what each is compressed with."""

from __future__ import annotations

from typing import Final, Literal

Format = Literal["parquet", "arrow", "jsonl"]
Compression = Literal["none", "snappy", "gzip", "brotli", "lz4", "zstd"]

#: What each format can be compressed with, its default first.
COMPRESSIONS: Final[dict[Format, tuple[Compression, ...]]] = {
    "parquet": ("snappy", "zstd", "gzip", "brotli", "lz4", "none"),
    "arrow": ("none", "lz4", "zstd"),
    "jsonl": ("none",),
}
