"""Micro-batches: how far one goes, and that the checkpoint keeps its plan."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_reader import admission
from spark_reader.planning import Piece
from ziplog.errors import ConfigError


@st.composite
def piece_lists(draw: st.DrawFn) -> list[Piece]:
    """Return pieces of [1, end) of some shards."""
    end = draw(st.integers(2, 60))
    pieces = []
    for shard in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(2, end - 1), max_size=6)) if end > 2 else [])
        bounds = [1, *cuts, end]
        pieces += [
            Piece(shard, start, stop, draw(st.integers(0, 50))) for start, stop in pairwise(bounds)
        ]
    return pieces


def stored(pieces: list[Piece], stop: int) -> int:
    return sum(piece.size for piece in pieces if piece.start < stop)


@given(piece_lists(), st.integers(0, 400))
def test_a_micro_batch_is_as_large_as_the_limit_allows(pieces: list[Piece], limit: int) -> None:
    stops = sorted({piece.stop for piece in pieces})
    fitting = [stop for stop in stops if stored(pieces, stop) <= limit]
    assert admission.admissible_stop(pieces, limit) == (fitting[-1] if fitting else stops[0])


gsns = st.integers(1, 2**62)
pieces_in_plans = st.builds(Piece, st.integers(0, 9), gsns, gsns, st.just(0))
plans = st.lists(st.lists(pieces_in_plans, min_size=1, max_size=3), max_size=4)


@given(st.integers(0, 2**62), plans)
def test_the_checkpoint_contains_the_plan(gsn: int, plan: list[list[Piece]]) -> None:
    kept = json.loads(json.dumps(admission.offset(gsn, plan)))
    assert admission.position(kept) == gsn
    assert admission.tasks(kept) == plan
    assert all(isinstance(value, int | str) for value in kept.values()), "Spark asks for no more"


@pytest.mark.parametrize(
    "offset", [{}, {"gsn": "7"}, {"gsn": -1}, {"0": {"topic": 5}}, {"gsn": None}]
)
def test_a_foreign_checkpoint_is_refused(offset: dict[str, object]) -> None:
    for read in (admission.position, admission.tasks):
        with pytest.raises(ConfigError, match="the checkpoint's offset is"):
            read(offset)


@pytest.mark.parametrize("plan", [None, ";", "1:2", "1:2-3;", "a:1-2", "1:2-3,,1:3-4", 7])
def test_a_malformed_plan_is_refused(plan: object) -> None:
    with pytest.raises(ConfigError, match="the checkpoint's plan is"):
        admission.tasks({"gsn": 9, "tasks": plan})
