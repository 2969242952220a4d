"""The thesis' Fig. 4.2 as scripts: the gsns of shards at their expected rates.

Quotations are from Cong Ding, *Building a Scalable Shared Log* (Cornell 2020), section 4.2.3.
See tests/sim/test_paper for the other cases.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from mms.weights import Weights
from tests.sim.script import Call, Client, Reader, stage
from tests.simulator.kernel import MS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ziplog.core.view import Lease

PRIMARY = "shard-0-0"


def merged(rates: Sequence[int], count: int) -> list[int]:
    """Return the shards of `count` positions by the figure's words, with exact fractions."""
    arrivals = [
        (Fraction(j, rate), shard) for shard, rate in enumerate(rates) for j in range(1, count + 1)
    ]
    return [shard for _, shard in sorted(arrivals)[:count]]


@pytest.fixture
def figure_rates(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Make the membership service announce the figure's rates: 3 and 2 records a millisecond.

    The figure's shards 1 and 2 are shards 0 and 1 here. Another test covers measured rates.
    """
    monkeypatch.setattr(Weights, "for_shards", lambda _self, shards: [3, 2][: len(shards)])
    return 3, 2


def test_fig_4_2_records_that_arrive_as_expected_fill_the_log_in_that_order(
    figure_rates: tuple[int, int],
) -> None:
    """'projected onto the real-time axis to produce a total order', 'without no-ops'.

    Two milliseconds of arrivals: 1/3, 1/2, 2/3, 1 (of the first shard: its identifier breaks the
    tie), 1 (of the second), and so on. They receive consecutive gsns, and a reader never waits for
    an empty position.
    """
    with stage(shards=2) as s:
        clients = [Client(s, "one", 0), Client(s, "two", 1)]
        base = s.fresh_epoch()
        assert [m.weight for m in s.lease_at(base).members] == list(figure_rates)
        reader = Reader(s, "reader", base)
        calls: list[tuple[int, Call]] = []
        now = s.now + 1 * MS
        arrivals = sorted(
            (Fraction(j * MS, rate), shard)
            for shard, rate in enumerate(figure_rates)
            for j in range(1, 2 * rate + 1)
        )
        for index, (at, shard) in enumerate(arrivals):
            s.run(now + int(at) - s.now)
            calls.append((shard, clients[shard].insert(b"%d" % index)))
        s.run(20 * MS)

        owners = merged(figure_rates, 10)
        assert [shard for shard, _ in calls] == [0, 1, 0, 0, 1] * 2 == owners
        assert [call.gsns for _, call in calls] == [[base + i] for i in range(10)]
        assert [call.delays for _, call in calls] == [2] * 10
        assert [client.paths for client in clients] == [(6, 0), (4, 0)]
        assert reader.delivered == [(base + i, b"%d" % i) for i in range(10)]
        for shard in range(2):
            held = {gsn: p for gsn, p in reader.delivered if owners[gsn - base] == shard}
            assert s.settle(shard) == held
            for server in range(2):
                skipped = [
                    gsn
                    for start, stop in s.no_ops(f"shard-{shard}-{server}")
                    for gsn in range(max(start, base), min(stop, base + 10))
                ]
                assert not [gsn for gsn in skipped if owners[gsn - base] == shard]


def test_fig_4_2_records_that_come_faster_than_expected_take_the_next_gsns(
    figure_rates: tuple[int, int],
) -> None:
    """'if records are received at a higher rate than expected, shards simply assign ... their next'

    The second shard gets all the records. The first one's positions between them stay its own, and
    become no-ops once a reader waits after them (the thesis: after 'a certain timeout'): 'the
    shard assigns the corresponding gsn to a no-op'.
    """
    with stage(shards=2) as s:
        one, two = Client(s, "one", 0), Client(s, "two", 1)
        base = s.fresh_epoch()
        calls = [two.wait(two.insert(b"%d" % n)) for n in range(5)]
        owned = [o for o, shard in enumerate(merged(figure_rates, 25)) if shard == 1]
        assert [call.gsns for call in calls] == [[base + o] for o in owned[:5]]
        assert s.log(PRIMARY) == {}

        reader = Reader(s, "reader", base)
        s.until(lambda: len(reader.delivered) == 5)
        last = calls[-1].gsns[0]
        assert [gsn for gsn, _ in reader.delivered] == [base + o for o in owned[:5]]
        assert any(start <= base and stop == last + 1 for start, stop in s.no_ops(PRIMARY))
        late = one.wait(one.insert(b"late"))
        assert late.gsns[0] > last, "a no-op position gets no record"
        assert s.settle(0) == {late.gsns[0]: b"late"}


@pytest.mark.parametrize(
    ("per_ms", "weights"), [((4, 1), [4, 1]), ((1, 2), [1, 2]), ((3, 2), [3, 2])]
)
def test_4_2_3_the_rates_of_one_epoch_are_expected_in_later_ones(
    per_ms: tuple[int, int], weights: list[int]
) -> None:
    """'Shards share the update rate experienced ... which uses it to set the rate value'

    Rates are rounded to three significant bits (mms/weights.py), without their common factor: so
    the figure's own rates make its own schedule.
    """
    with stage(shards=2, epoch_ms=10) as s:
        clients = [Client(s, "one", 0), Client(s, "two", 1)]
        calls: list[Call] = []

        def work(shard: int) -> None:
            calls.append(clients[shard].insert(*[b"record"] * (10 * per_ms[shard])))
            s.kernel.after(10 * MS, lambda: work(shard))

        work(0)
        work(1)
        seen: list[list[int]] = []

        def newest() -> Lease:
            last = s.cluster.state.last
            assert last is not None
            return last

        for _ in range(40):
            s.run(100 * MS)
            seen.append([member.weight for member in newest().members])
        # All batches come at multiples of an epoch's length: a sample right before one shows none.
        assert seen[5:].count(weights) >= 32
        s.until(lambda: [member.weight for member in newest().members] == weights)
        s.run(100 * MS)
        last = newest()
        recent = [call for call in calls if call.ended][-10:]
        owners = merged(weights, 10 * last.schedule.round_length)
        for call in recent:
            lease = s.lease_at(call.gsns[0])
            offsets = [(g - lease.base) % lease.epoch_size for g in call.gsns]
            (shard,) = {rid.shard for rid in call.result}
            assert {owners[offset % len(owners)] for offset in offsets} == {shard}
            between = range(offsets[0], offsets[-1] + 1)
            assert [o for o in between if owners[o % len(owners)] == shard] == offsets
