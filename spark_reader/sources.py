"""Selects the source of a load: a running cluster, or files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_reader.file_source import FileSource
from spark_reader.log_source import LogSource

if TYPE_CHECKING:
    from spark_reader.options import Options
    from spark_reader.reading import Source


def source_of(options: Options) -> Source:
    """Return the source; nothing is opened yet."""
    return FileSource(options) if options.path else LogSource(options)
