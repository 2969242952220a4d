"""Ordeals of all kinds: failures at random, and what clients were told must be true."""

from __future__ import annotations

import pytest

from tests.ordeal import Ordeal, Trial


@pytest.mark.parametrize("seed", range(6))
def test_nothing_acknowledged_is_lost(seed: int) -> None:
    Ordeal(seed, Trial(steps=80)).run()


@pytest.mark.parametrize("seed", range(4))
def test_a_power_cut_loses_nothing_at_level_disk(seed: int) -> None:
    kinds = ("kill", "kill_all", "kill_all", "pause")
    Ordeal(seed, Trial(steps=80, durability="disk", kinds=kinds)).run()


@pytest.mark.parametrize("seed", range(4))
def test_two_servers_of_a_shard_may_fail_with_f_2(seed: int) -> None:
    Ordeal(seed, Trial(steps=80, shards=1, f=2, failures=0.1)).run()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_long_ordeals(seed: int) -> None:
    f = 1 + seed % 2
    Ordeal(seed, Trial(steps=250, shards=3 - f, f=f, failures=0.08, loss=0.05)).run()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 208))
def test_long_ordeals_with_power_cuts(seed: int) -> None:
    kinds = ("kill", "kill", "pause", "cut", "kill_all")
    Ordeal(seed, Trial(steps=200, durability="disk", kinds=kinds, failures=0.08)).run()
