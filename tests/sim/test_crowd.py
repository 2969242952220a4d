"""An overloaded shard keeps its rate and its view."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.sim.crowd import load
from ziplog.client.inserts.inflight import ShardWindow
from ziplog.client.inserts.retransmission import Budget, RetransmitTimeout
from ziplog.runtime import inbox

if TYPE_CHECKING:
    from collections.abc import Callable

#: A server takes 4 ms for an insert, so the maximum is 250 per second.
INSERT_US = 4_000
SECONDS = 12


@pytest.mark.parametrize(
    ("clients", "depth"),
    [
        (8, 1),
        (100, 1),
        pytest.param(400, 1, marks=pytest.mark.nightly),
        pytest.param(4, 100, marks=pytest.mark.nightly),
    ],
)
def test_goodput_stays_near_the_peak_and_no_view_changes(clients: int, depth: int) -> None:
    found = load(clients, depth=depth, insert_us=INSERT_US, seconds=SECONDS)
    assert found.per_s >= 0.5 * 1_000_000 / INSERT_US, found
    assert found.new_views == 0, found
    assert found.copies <= 4 * clients + found.inserts / 10, found


def unlimited(patch: pytest.MonkeyPatch) -> None:
    """A client may send unlimited copies, and its timeout never grows."""
    patch.setattr(Budget, "spend", lambda _: True)
    patch.setattr(RetransmitTimeout, "back_off", lambda _: None)


def without_evidence(patch: pytest.MonkeyPatch) -> None:
    """Every unit counts as lost after its timeout."""
    patch.setattr(ShardWindow, "was_passed_over", lambda *_: True)


def in_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    """A heartbeat waits after the inserts that arrived before it."""
    patch.setattr(inbox, "is_urgent", lambda _: False)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(unlimited, marks=pytest.mark.nightly),
        pytest.param(without_evidence, marks=pytest.mark.nightly),
        pytest.param(in_order_of_arrival, marks=pytest.mark.nightly),
    ],
)
def test_without_its_rules_it_does_not(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    found = load(400, depth=1, insert_us=INSERT_US, seconds=SECONDS)
    assert found.new_views > 0 or found.per_s < 0.5 * 1_000_000 / INSERT_US, found
