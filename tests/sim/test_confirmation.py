"""Confirmation of a view: nothing that the survivor alone holds is served (section 11)."""

from __future__ import annotations

from itertools import product
from unittest.mock import patch

import pytest

from failure_handler.recovery import Recovery
from shard.serving.readers import Readers
from tests.sim.script import Client, Reader, stage
from tests.simulator.kernel import MS, S
from ziplog.client.common.requests import TailRequest
from ziplog.wire import Suspect, TailReply

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
        s.until(lambda: s.state(SURVIVOR).server_state == "joined")
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


def isolated_survivor_is_asked_for_the_tail() -> None:
    """Run a script: the others go on without a survivor that hears nothing of it."""
    with stage(f=2, epoch_ms=10) as s:
        writer, asker = Client(s, "writer"), Client(s, "asker")
        writer.wait(writer.insert(b"of all"))
        for other in (*OTHERS, "writer"):
            s.network.cut(SURVIVOR, other)
            s.network.cut(other, SURVIVOR)
        insert = writer.insert(b"of the others")
        lost = [s.lose(other, "fh-0", Suspect) for other in OTHERS]
        s.until(lambda: s.state(SURVIVOR).server_state == "joined")
        s.network.cut("fh-0", SURVIVOR)
        s.network.cut(SURVIVOR, "fh-0")
        s.heal(*lost)
        (gsn,) = writer.wait(insert).gsns
        for other in OTHERS:
            s.delay(other, "asker", TailReply, 100 * MS)
        tail = asker.wait(asker.begin(TailRequest(asker.process.clock() + 10 * S)))
        assert tail.result.gsn >= gsn, "an insert had completed"


def test_the_tail_covers_an_insert_that_completed_in_a_view_without_the_survivor() -> None:
    isolated_survivor_is_asked_for_the_tail()


def test_a_tail_of_a_view_that_is_not_confirmed_is_noticed() -> None:
    with (
        patch.object(Readers, "_is_confirmed", new=True),
        pytest.raises(AssertionError, match="an insert had completed"),
    ):
        isolated_survivor_is_asked_for_the_tail()


def test_a_record_that_only_the_survivor_holds_is_not_served() -> None:
    survivor_dies_alone()


def test_a_view_that_the_survivor_alone_confirms_is_noticed() -> None:
    """Then the record is delivered, and lost with the survivor."""
    with (
        patch.object(Recovery, "_copies_needed", return_value=1),
        pytest.raises(AssertionError, match="no other replica held it"),
    ):
        survivor_dies_alone()
