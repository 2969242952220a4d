"""Suggestions for unknown names."""

from __future__ import annotations

from spark_reader.suggestions import closest_name


def test_the_closest_name_is_found_regardless_of_case() -> None:
    names = ("startingOffsets", "endingOffsets", "path")
    assert closest_name("STARTINGOFFSET", names) == "startingOffsets"
    assert closest_name("pth", names) == "path"


def test_without_a_similar_name_there_is_no_suggestion() -> None:
    assert closest_name("xyz", ("startingOffsets", "path")) is None
    assert closest_name("path", ()) is None
