"""Confirmation of a view: nothing that the survivor alone holds is served (section 11)."""

from __future__ import annotations

from itertools import product
from unittest.mock import patch

import pytest

from failure_handler.recovery import Recovery
from tests.sim.script import Client, Reader, stage
from tests.simulator.kernel import S
from ziplog.wire import Suspect

SURVIVOR, OTHERS = "shard-0-0", ("shard-0-1", "shard-0-2")


def survivor_dies_alone() -> None:
    """Run a script: two servers cannot reach the third, which begins a view alone and dies."""
    with stage(f=2, epoch_ms=10) as s:
        writer = Client(s, "writer")
        reader = Reader(s, "reader", 1)
        writer.wait(writer.insert(b"of all"))
        reader.until(1)
        for one, other in product((SURVIVOR, "writer"), OTHERS):
            s.network.cut(one, other)
            s.network.cut(other, one)
        insert = writer.insert(b"of the survivor")
        # The first server that reports to the failure handler is the candidate.
        lost = [s.lose(other, "fh-0", Suspect) for other in OTHERS]
        s.until(lambda: s.state(SURVIVOR).state == "joined")
        s.heal(*lost)
        s.run(2 * S)
        delivered = list(reader.delivered)
        s.cluster.lose_disk(SURVIVOR)
        s.network.heal_all()
        log = s.settle()
        writer.wait(insert)
        assert [payload for _, payload in delivered] == [b"of all"], "no other replica held it"
        assert set(delivered) <= log.items()
        assert reader.until(2) == sorted(s.log(OTHERS[0]).items())


def test_a_record_that_only_the_survivor_holds_is_not_served() -> None:
    survivor_dies_alone()


def test_a_view_that_the_survivor_alone_confirms_is_noticed() -> None:
    """Then the record is delivered, and lost with the survivor."""
    with (
        patch.object(Recovery, "_copies_needed", 1),
        pytest.raises(AssertionError, match="no other replica held it"),
    ):
        survivor_dies_alone()
