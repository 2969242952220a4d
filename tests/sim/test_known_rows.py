"""Readers that begin anywhere in a log with repeated rows, with faults (docs/protocol.md, 14.3)."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.properties import seeds
from tests.sim.checks import Row
from tests.sim.mutants_of_rows import restarts, row_writers
from tests.sim.mutation import LOSSY
from tests.sim.plan import Fault, server_name
from tests.sim.rows import once
from tests.sim.run import run

if TYPE_CHECKING:
    from tests.sim.plan import Plan

_FAULTS = ("kill", "kill", "power", "pause", "isolate")


def disturbed(seed: int) -> Plan:
    """Return a run over a network that loses frames, with readers and servers that fail."""
    random = Random(f"disturbed {seed}")
    faults = [
        Fault(
            random.randrange(4_000), random.choice(_FAULTS),
            (server_name(random.randrange(2), random.randrange(2)),), random.choice((20, 1_200)),
        )
        for _ in range(3)
    ]  # fmt: skip
    clients = [
        Fault(random.randrange(4_000), "kill-client", (f"reader-{random.randrange(3)}",))
        for _ in range(6)
    ]
    return row_writers(seed, *faults, *clients, owners=1)._replace(conditions=LOSSY)


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_readers_that_restart_get_each_row_once(seed: int) -> None:
    assert run(restarts(seed)).records


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_readers_get_each_row_once_despite_faults(seed: int) -> None:
    assert run(disturbed(seed)).records


def test_first_position_of_a_row_counts() -> None:
    rows = [Row(4, 0, b"row 0-0-0"), Row(2, 0, b"row 0-0-0"), Row(3, 0, b"x"), Row(5, 0, b"x")]
    assert once(rows) == [rows[1], rows[2], rows[3]]
