"""The clock of nodes counts the time during which the machine is suspended."""

from __future__ import annotations

import inspect
import time

import pytest

from ziplog.client import arguments
from ziplog.client.engines.engine import Engine
from ziplog.runtime import clock
from ziplog.runtime.driver import Driver

SUSPENDED_NS = 3600 * 1_000_000_000


def test_time_while_the_machine_is_suspended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.clock_gettime_ns

    def after_suspend(number: int) -> int:
        return real(number) + (SUSPENDED_NS if number == time.CLOCK_BOOTTIME else 0)

    monkeypatch.setattr(time, "clock_gettime_ns", after_suspend)
    now_ns = clock._choose()
    before, now, after = time.monotonic_ns(), now_ns(), real(time.CLOCK_BOOTTIME)
    assert before + SUSPENDED_NS <= now <= after + SUSPENDED_NS


def test_systems_without_that_clock_use_their_monotonic_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    before = time.monotonic_ns()
    assert before <= clock._choose()() <= time.monotonic_ns()
    monkeypatch.delattr(time, "CLOCK_MONOTONIC")
    assert clock._choose() is time.monotonic_ns


@pytest.mark.parametrize("runs_nodes", [Driver, Engine])
def test_drivers_and_engines_use_this_clock(runs_nodes: type) -> None:
    assert inspect.signature(runs_nodes).parameters["clock"].default is clock.now_ns


def test_deadlines_use_the_same_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "now_ns", lambda: SUSPENDED_NS)
    assert arguments.deadline_ns(2.0, 30.0) == SUSPENDED_NS + 2_000_000_000
