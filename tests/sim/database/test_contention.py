"""The effect of latency on contended transactions."""

from __future__ import annotations

import pytest

from tests.sim.database.contention import LINES, Connections, Line, Point, measure
from tests.simulator.kernel import US, Kernel

ZIPLOG, RECORD_PER_WRITE, HELD, HELD_RECORD_PER_WRITE = LINES.values()


def _few(line: Line, clients: int) -> Point:
    return measure(line, clients, shards=2, virtual_ms=25, warm_ms=5)


@pytest.mark.parametrize("clients", [1, 4])
def test_slower_inserts_reduce_commits(clients: int) -> None:
    quick, held = _few(ZIPLOG, clients), _few(HELD, clients)
    assert quick.commits_per_s > 1.5 * held.commits_per_s
    assert quick.commit_p50_us < 600
    # And a read's round trip, and the decision's way: three hops of 40 µs at least. (A lone client
    # knows what it reads.)
    assert held.commit_p50_us >= 900 + (3 if clients > 1 else 1) * 40
    if clients == 1:
        assert quick.abort_share == held.abort_share == 0


def test_a_record_per_write_costs_one_more_insert() -> None:
    quick, held = _few(RECORD_PER_WRITE, 1), _few(HELD_RECORD_PER_WRITE, 1)
    # Two hops of 40 to 60 µs, and 900 µs.
    assert quick.commit_p50_us >= _few(ZIPLOG, 1).commit_p50_us + 2 * 40
    assert held.commit_p50_us >= 2 * 900 + 40


def test_a_faster_log_commits_more_with_fewer_aborts() -> None:
    """Aborts grow with the number of clients: a faster log needs fewer clients."""
    few, many = _few(ZIPLOG, 8), _few(HELD, 16)
    assert few.commits_per_s > 1.2 * many.commits_per_s
    assert many.abort_share > 1.2 * few.abort_share > 0


def test_frames_of_one_link_keep_their_order() -> None:
    kernel = Kernel(1)
    connections = Connections(kernel)
    arrivals = []
    for _ in range(100):
        arrivals.append(kernel.now + connections.carry("a", "b", b""))
        assert kernel.now + 40 * US <= arrivals[-1] <= kernel.now + 60 * US
        kernel.run(1 * US)
    assert arrivals == sorted(arrivals)
    others = [connections.carry("a", f"b{number}", b"") for number in range(100)]
    assert others != sorted(others), "links have nothing to do with each other"
