"""`ziplog.runtime.metrics`: what a process reports of its connections and frames."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import TYPE_CHECKING

import pytest

from tests.integration.ziplog.driver_world import World
from ziplog.monitor.catalogue import CATALOGUE
from ziplog.runtime import descriptors
from ziplog.runtime.metrics import Reporter
from ziplog.runtime.transport import Transport

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def transport() -> Iterator[Transport]:
    opened = Transport()
    yield opened
    opened.close()


def reported(transport: Transport, world: World) -> dict[tuple[str, ...], float]:
    """Return the values by name and label values."""
    report = Reporter(transport, lambda _driver, _now: ([], []), lambda: 7)
    found = report(world.driver, 1).values
    assert {value.name for value in found} <= set(CATALOGUE)
    return {(value.name, *value.labels.values()): value.value for value in found}


def test_connections_and_handshakes_are_reported_by_cause(transport: Transport) -> None:
    counters = transport.counters
    transport.garbage, counters.flooded, counters.silent = 1, 2, 3
    counters.handshakes.update(ok=4, malformed=5, ended=6)
    values = reported(transport, World())
    causes = ("malformed", "flood", "silent", "limit")
    assert [values["ziplog_connections_cut_total", one] for one in causes] == [1, 2, 3, 0]
    results = ("ok", "malformed", "ended")
    assert [values["ziplog_handshakes_total", one] for one in results] == [4, 5, 6]


def test_frames_and_bytes_are_reported_by_direction(transport: Transport) -> None:
    counters = transport.counters
    counters.received_frames, counters.sent_frames = 1, 2
    counters.received_bytes, counters.sent_bytes = 30, 40
    values = reported(transport, World())
    for name, received, sent in (("frames", 1, 2), ("frame_bytes", 30, 40)):
        assert values[f"ziplog_{name}_total", "received"] == received
        assert values[f"ziplog_{name}_total", "sent"] == sent


def test_each_dropped_frame_has_one_reason(transport: Transport) -> None:
    world = World()
    transport.dropped, transport.counters.unroutable = 10, 4
    world.driver.bad_frames, world.driver.other_versions = 7, 2
    world.driver._inbox.dropped = 3
    values = reported(transport, world)
    reasons = {"queue": 6, "unknown-peer": 4, "overload": 3, "malformed": 5, "version": 2}
    dropped = {key[1]: value for key, value in values.items() if "dropped" in key[0]}
    assert dropped == reasons


def test_a_process_without_a_free_descriptor_reports_how_many_it_has(
    transport: Transport,
) -> None:
    world = World()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as taken:
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        limit = descriptors.open_descriptors() + 5
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.callback(os.close, os.dup(2))
        values = reported(transport, world)
    assert values["process_open_fds",] == limit
    assert ("process_resident_memory_bytes",) not in values
    assert ("process_resident_memory_bytes",) in reported(transport, world)
