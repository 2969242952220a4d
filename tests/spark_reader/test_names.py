"""Which name was meant."""

from __future__ import annotations

from spark_reader.suggestions import closest_name


def test_the_nearest_is_found_without_regard_to_case_as_it_is_written() -> None:
    names = ("startingOffsets", "endingOffsets", "path")
    assert closest_name("STARTINGOFFSET", names) == "startingOffsets"
    assert closest_name("pth", names) == "path"


def test_what_is_like_none_is_none() -> None:
    assert closest_name("xyz", ("startingOffsets", "path")) is None
    assert closest_name("path", ()) is None
