"""The thesis' figures and cases as scripts: real servers, services and clients in virtual time.

Quotations are from Cong Ding, *Building a Scalable Shared Log* (Cornell 2020), chapter 4. A script
holds back or loses single frames on purpose; all others take `DELAY_NS`. It then asserts what every
participant ends up with: the positions, the acks and how many message delays they took, what both
replicas hold, what readers were given.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from mms.weights import Weights
from tests.sim.script import DELAY_NS, Call, Client, Reader, Stage, stage
from ziplog.sim.kernel import MS, US, S
from ziplog.wire import Forward, Insert, InsertAck, Resend

if TYPE_CHECKING:
    from collections.abc import Sequence

PRIMARY, BACKUP = "shard-0-0", "shard-0-1"


def acks(s: Stage, server: str, client: Client) -> list[tuple[bool, list[int]]]:
    """Return what a server told a client: whether it was decided, and where."""
    return [(ack.confirmed, ack.gsns) for ack in s.said(server, client.name, InsertAck)]


def merged(rates: Sequence[int], count: int) -> list[int]:
    """Return the shards of `count` positions by the figure's words, with exact fractions."""
    arrivals = [
        (Fraction(j, rate), shard) for shard, rate in enumerate(rates) for j in range(1, count + 1)
    ]
    return [shard for _, shard in sorted(arrivals)[:count]]


# --- 4.2.3 Global Sequence Number Assignment: Fig. 4.2 ---


@pytest.fixture
def figure_rates(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Have the membership service announce the figure's rates: 3 and 2 records a millisecond.

    The figure's shards 1 and 2 are shards 0 and 1 here. What the service makes of rates that it
    measures is another test's.
    """
    monkeypatch.setattr(Weights, "of", lambda _self, shards: [3, 2][: len(shards)])
    return 3, 2


def test_fig_4_2_records_that_arrive_as_expected_fill_the_log_in_that_order(
    figure_rates: tuple[int, int],
) -> None:
    """'projected onto the real-time axis to produce a total order', 'without no-ops'.

    Two milliseconds of arrivals: 1/3, 1/2, 2/3, 1 (of the first shard: its identifier breaks the
    tie), 1 (of the second), and so on. They get consecutive gsns, and a reader never has to wait
    for a position that stays empty.
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
    """'if records are received at a higher rate than expected, shards simply assign ... next gsns'

    The second shard gets all the records; the first one's positions between them stay its own, and
    become no-ops once a reader waits behind them: 'the shard assigns the corresponding gsn to a
    no-op'.
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
        assert late.gsns[0] > last, "what became a no-op gets no record"
        assert s.settle(0) == {late.gsns[0]: b"late"}


@pytest.mark.parametrize(
    ("per_ms", "weights"), [((4, 1), [4, 1]), ((1, 2), [1, 2]), ((3, 2), [2, 1])]
)
def test_4_2_3_the_rates_of_one_epoch_are_expected_in_later_ones(
    per_ms: tuple[int, int], weights: list[int]
) -> None:
    """'Shards share the update rate experienced ... which uses it to set the rate value'

    Rates are rounded to powers of two of the slowest one (mms/weights.py): so the figure's own
    rates make a schedule of two to one.
    """
    with stage(shards=2, epoch_ms=10) as s:
        clients = [Client(s, "one", 0), Client(s, "two", 1)]
        calls: list[Call] = []

        def work(shard: int) -> None:
            calls.append(clients[shard].insert(*[b"record"] * (10 * per_ms[shard])))
            s.kernel.after(10 * MS, lambda: work(shard))

        work(0)
        work(1)
        s.run(4 * S)
        last = s.cluster.state.last
        assert last is not None
        assert [member.weight for member in last.members] == weights
        recent = [call for call in calls if call.ended][-10:]
        owners = merged(weights, 10 * last.schedule.round_length)
        for call in recent:
            lease = s.lease_at(call.gsns[0])
            offsets = [(g - lease.base) % lease.epoch_size for g in call.gsns]
            (shard,) = {rid.shard for rid in call.result}
            assert {owners[offset % len(owners)] for offset in offsets} == {shard}
            between = range(offsets[0], offsets[-1] + 1)
            assert [o for o in between if owners[o % len(owners)] == shard] == offsets


# --- 4.2.4 Replication: Fig. 4.3 ---


def test_fig_4_3_a_identical_gsns() -> None:
    """'The client receives identical gsns': done 'after two message delays'.

    The primary's word comes to the backup afterwards: 'no further action is needed'.
    """
    with stage() as s:
        alice = Client(s, "alice")
        base = s.fresh_epoch()
        call = alice.wait(alice.insert(b"A"))
        assert (call.gsns, call.delays, alice.paths) == ([base], 2, (1, 0))
        (forward,) = s.said(PRIMARY, BACKUP, Forward)
        assert forward.decisions[-1].gsns == [base]
        assert s.guesses(BACKUP) == {b"A": [base]}, "done before the backup heard the primary"

        assert s.settle() == {base: b"A"}
        assert s.guesses(BACKUP) == {}
        assert acks(s, PRIMARY, alice) == [(True, [base])]
        assert acks(s, BACKUP, alice) == [(False, [base])], "one ack is all that was due"
        assert alice.read(base) == b"A"


def cross(s: Stage, alice: Client, bob: Client) -> tuple[Call, Call]:
    """Let two clients insert so that the primary sees alice first, and the backup sees bob first.

    Alice's copy takes longer to the backup, bob's to the primary; nothing else differs.
    """
    s.late(alice.name, BACKUP, Insert, 20 * US, count=1)
    s.late(bob.name, PRIMARY, Insert, 20 * US, count=1)
    return alice.insert(b"A"), bob.insert(b"B")


def test_fig_4_3_b_different_gsns() -> None:
    """'The client initially does not receive identical gsns and has to wait': three delays.

    The backup has the two records in the other order. It stores each 'in log position gsn_p' of the
    primary and 'sends an updated acknowledgment'; what it overwrites does 'no harm'.
    """
    with stage() as s:
        alice, bob = Client(s, "alice"), Client(s, "bob")
        base = s.fresh_epoch()
        a, b = cross(s, alice, bob)
        s.run(DELAY_NS + 50 * US)
        assert s.guesses(BACKUP) == {b"B": [base], b"A": [base + 1]}
        assert s.log(PRIMARY) == {base: b"A", base + 1: b"B"}
        s.run(DELAY_NS)
        assert not a.ended, "two acks that differ are no answer"
        assert not b.ended

        alice.wait(a)
        bob.wait(b)
        assert (a.gsns, b.gsns) == ([base], [base + 1])
        assert (a.delays, b.delays) == (3, 3)
        assert (alice.paths, bob.paths) == ((0, 1), (0, 1))
        assert acks(s, PRIMARY, alice) == [(True, [base])]
        assert acks(s, BACKUP, alice) == [(False, [base + 1]), (True, [base])]
        assert acks(s, PRIMARY, bob) == [(True, [base + 1])]
        assert acks(s, BACKUP, bob) == [(False, [base]), (True, [base + 1])]
        assert s.settle() == {base: b"A", base + 1: b"B"}
        assert (alice.read(base), bob.read(base + 1)) == (b"A", b"B")


def test_fig_4_3_b_the_primarys_word_arrives_out_of_order() -> None:
    """Forwards overtake each other: the backup applies them in the primary's order all the same.

    What came too early waits; until the first one is there, nobody is told anything new.
    """
    with stage() as s:
        alice, bob = Client(s, "alice"), Client(s, "bob")
        base = s.fresh_epoch()
        s.late(PRIMARY, BACKUP, Forward, 1 * MS, count=1)
        s.lose(BACKUP, PRIMARY, Resend)  # it would ask for the first one, and get it sooner
        a, b = cross(s, alice, bob)
        s.run(4 * DELAY_NS)
        assert len(s.said(PRIMARY, BACKUP, Forward)) == 2
        assert s.guesses(BACKUP) == {b"B": [base], b"A": [base + 1]}, "the second word waits"
        assert not a.ended
        assert not b.ended
        alice.wait(a)
        bob.wait(b)
        assert (a.gsns, b.gsns) == ([base], [base + 1])
        assert (alice.paths, bob.paths) == ((0, 1), (0, 1))
        assert s.settle() == {base: b"A", base + 1: b"B"}


def test_fig_4_3_b_an_epoch_ends_between_the_two_copies() -> None:
    """The backup guesses in one epoch; the primary, whose copy comes late, decides in the next.

    The guess stands until the primary's word: its no-ops for the rest of the epoch take the
    position away, and the client waits for the one that all name.
    """
    with stage() as s:
        alice = Client(s, "alice")
        base = s.fresh_epoch()
        size = s.lease_at(base).epoch_size
        s.hold("alice", PRIMARY, Insert, until=s.now + 1100 * MS)
        call = alice.insert(b"A")
        s.run(1050 * MS)
        assert s.guesses(BACKUP) == {b"A": [base]}, "no time-out moves it"
        assert not call.ended
        alice.wait(call)
        assert call.gsns == [base + size]
        assert alice.paths == (0, 1)
        confirmed = [gsns for is_decided, gsns in acks(s, BACKUP, alice) if is_decided]
        assert {*map(tuple, confirmed)} == {(base + size,)}
        assert s.settle() == {base + size: b"A"}
        assert any(start <= base and stop == base + size for start, stop in s.no_ops(BACKUP))
