"""Which name was meant."""

from __future__ import annotations

from spark_reader.suggestions import nearest


def test_the_nearest_is_found_without_regard_to_case_as_it_is_written() -> None:
    names = ("startingOffsets", "endingOffsets", "path")
    assert nearest("STARTINGOFFSET", names) == "startingOffsets"
    assert nearest("pth", names) == "path"


def test_what_is_like_none_is_none() -> None:
    assert nearest("xyz", ("startingOffsets", "path")) is None
    assert nearest("path", ()) is None
