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
from ziplog.sim.kernel import MS, US, Kernel, S
from ziplog.sim.network import LOST, Conditions, Network
from ziplog.wire import Deliver, Forward, Insert, InsertAck, Locate, Refused, Resend

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
    """'if records are received at a higher rate than expected, shards simply assign ... their next'

    The second shard gets all the records. The first one's positions between them stay its own, and
    become no-ops once a reader waits behind them (the thesis: after 'a certain timeout'): 'the
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


# --- 4.2.5 Failure Recovery: 'a record may appear in the log more than once' ---


def die(s: Stage, server: str = PRIMARY) -> None:
    """Kill a server, whose supervisor starts it again soon; its links are good again."""
    s.cluster.nodes[server].kill()
    s.heal()


def copies(log: dict[int, bytes], payload: bytes) -> list[int]:
    """Return where a record is."""
    return [gsn for gsn, held in log.items() if held == payload]


def test_4_2_5_a_record_that_was_acknowledged_keeps_its_one_position() -> None:
    """'recovery must necessarily roll forward', and 'servers reject duplicate records'.

    The client is done by two acks; the primary dies before the backup hears of it. Copies of the
    record come while the shard recovers and when it is back, in its former view and in the new one:
    none of them is placed, and whoever acks names the same position.
    """
    with stage() as s:
        alice = Client(s, "alice")
        base = s.fresh_epoch()
        s.lose(PRIMARY, BACKUP, Forward)
        call = alice.wait(alice.insert(b"A"))
        assert (call.gsns, call.delays) == ([base], 2)
        assert s.log(BACKUP) == {}, "it has but its own guess"
        (insert,) = s.said("alice", BACKUP, Insert)
        die(s)
        s.until(lambda: s.replica(BACKUP)._state.state == "frozen")
        told = len(acks(s, BACKUP, alice))
        alice.send_again(insert, BACKUP, view=1)
        s.run(3 * DELAY_NS)
        assert len(acks(s, BACKUP, alice)) == told, "who promised to store nothing acks nothing"

        assert s.settle() == {base: b"A"}
        before = s.decisions(BACKUP)
        view = s.replica(BACKUP)._state.view
        assert view > 1
        for server in (PRIMARY, BACKUP):
            refused = len(s.said(server, "alice", Refused))
            alice.send_again(insert, server, view=1)
            s.run(3 * DELAY_NS)
            assert [r.code for r in s.said(server, "alice", Refused)[refused:]] == ["wrong-view"]
            told = len(acks(s, server, alice))
            alice.send_again(insert, server, view=view)
            s.run(3 * DELAY_NS)
            assert acks(s, server, alice)[told:] == [(True, [base])]
        s.settle()
        assert s.decisions(BACKUP) == before
        assert alice.read(base) == b"A"


def test_4_2_5_a_record_that_only_the_backup_placed_is_rolled_forward() -> None:
    """'filled (may or may not be stable)': the survivor cannot know, so the record stays.

    The primary never heard of it. The client repeats it before, while and after the shard recovers,
    and is told the position at which the backup held it.
    """
    with stage() as s:
        alice = Client(s, "alice")
        base = s.fresh_epoch()
        s.lose("alice", PRIMARY, Insert)
        call = alice.insert(b"A")
        s.run(50 * MS)
        assert acks(s, BACKUP, alice)[-1] == (False, [base])
        assert s.log(PRIMARY) == {}

        def told() -> int:
            return len(s.said("alice", BACKUP, Insert)) + len(s.said("alice", BACKUP, Locate))

        before = told()
        die(s)
        s.until(lambda: s.replica(BACKUP)._state.state == "frozen")
        while_down = told()
        assert before > 1
        assert while_down > before
        assert s.settle() == {base: b"A"}
        alice.wait(call)
        assert told() > while_down
        assert call.gsns == [base]
        assert Reader(s, "reader", base).until(1) == [(base, b"A")]
        assert s.settle() == {base: b"A"}


def test_4_2_5_a_client_whose_ack_is_lost_is_told_after_the_recovery() -> None:
    """Both replicas have the record, decided and stable; only the client does not know."""
    with stage() as s:
        alice = Client(s, "alice")
        base = s.fresh_epoch()
        s.lose(BACKUP, "alice", InsertAck)
        call = alice.insert(b"A")
        s.run(10 * MS)
        assert s.log(PRIMARY) == s.log(BACKUP) == {base: b"A"}
        assert not call.ended
        s.cluster.nodes[PRIMARY].kill()
        s.settle()
        s.heal()
        alice.wait(call)
        assert call.gsns == [base]
        assert s.settle() == {base: b"A"}


def test_4_2_5_the_duplicate() -> None:
    """'... receives record R from a client and stores it at log position i. Next, it receives the
    same record from the primary at log position j ... suppose all other storage servers ... crash.'

    The rule: 'remove any other copies of R in other slots before storing R in slot j'. Here R is
    alice's record, i the second position and j the first. Bob's record, which the backup held at j,
    is overwritten; the primary's word about it is lost with the primary, so it is nowhere, and bob
    inserts it once more: also once.
    """
    with stage() as s:
        alice, bob = Client(s, "alice"), Client(s, "bob")
        base = s.fresh_epoch()
        a, b = cross(s, alice, bob)
        s.late(PRIMARY, BACKUP, Forward, 50 * US, count=1)  # first the guess, then the word
        s.lose(PRIMARY, BACKUP, Forward)
        s.run(DELAY_NS + 50 * US)
        assert s.guesses(BACKUP) == {b"B": [base], b"A": [base + 1]}
        alice.wait(a)
        assert (a.gsns, alice.paths) == ([base], (0, 1))
        assert (s.log(BACKUP), s.guesses(BACKUP)) == ({base: b"A"}, {})
        assert s.log(PRIMARY) == {base: b"A", base + 1: b"B"}
        assert not b.ended

        die(s)
        bob.wait(b)
        log = s.settle()
        assert copies(log, b"A") == [base]
        assert copies(log, b"B") == b.gsns
        assert b.gsns[0] > base + 1, "all that was granted to the former view is settled"
        assert Reader(s, "reader", base).until(2) == [(base, b"A"), (b.gsns[0], b"B")]
        assert any(start <= base + 1 < stop for start, stop in s.no_ops(PRIMARY))


def test_4_2_5_the_primarys_word_counts_if_the_backup_heard_all_of_it() -> None:
    """As the duplicate, but both words arrived: the log is the primary's, guesses are forgotten.

    Bob's record was at the first position and is at the second one: copies behind and before the
    primary's choice are removed alike. The clients are not told before the primary dies.
    """
    with stage() as s:
        alice, bob = Client(s, "alice"), Client(s, "bob")
        base = s.fresh_epoch()
        for client in (alice, bob):
            s.lose(PRIMARY, client.name, InsertAck)
        a, b = cross(s, alice, bob)
        s.run(10 * MS)
        assert acks(s, BACKUP, alice) == [(False, [base + 1]), (True, [base])]
        assert acks(s, BACKUP, bob) == [(False, [base]), (True, [base + 1])]
        assert not a.ended
        assert not b.ended

        die(s)
        alice.wait(a)
        bob.wait(b)
        assert (a.gsns, b.gsns) == ([base], [base + 1])
        assert s.settle() == {base: b"A", base + 1: b"B"}
        assert Reader(s, "reader", base).until(2) == [(base, b"A"), (base + 1, b"B")]


def test_4_2_5_the_guess_counts_if_the_primarys_decision_died_with_it() -> None:
    """The backup's guesses and the primary's decisions differ, and the backup never hears of them.

    Each client has two acks that name different positions, so nobody is done; what the survivor
    holds is rolled forward, and the former primary, whose disk has them the other way round, drops
    its own.
    """
    with stage() as s:
        alice, bob = Client(s, "alice"), Client(s, "bob")
        base = s.fresh_epoch()
        s.lose(PRIMARY, BACKUP, Forward)
        a, b = cross(s, alice, bob)
        s.run(15 * MS)  # it is on the primary's disk by now
        assert s.log(PRIMARY) == {base: b"A", base + 1: b"B"}
        assert (acks(s, PRIMARY, alice), acks(s, BACKUP, alice)) == (
            [(True, [base])],
            [(False, [base + 1])],
        )
        assert not a.ended
        assert not b.ended

        die(s)
        alice.wait(a)
        bob.wait(b)
        assert (a.gsns, b.gsns) == ([base + 1], [base])
        assert s.settle() == {base: b"B", base + 1: b"A"}
        assert Reader(s, "reader", base).until(2) == [(base, b"B"), (base + 1, b"A")]
        assert (alice.read(base + 1), bob.read(base)) == (b"A", b"B")


# --- 4.2.3: the special no-op token ---


def test_4_2_3_a_token_says_nothing_of_other_shards_positions() -> None:
    """'This approach introduces a subtlety: it is possible for the shard that owns a gsn to have
    associated it with a record, while other shards have instead associated it with the special
    no-op token. Therefore, when a client library ... receives from a shard a special no-op token
    covering a range of gsns for epoch e, it must wait to receive the special no-op token from every
    shard in e before it can determine for which of these gsns it should return a no-op.'

    The other shard's token covers alice's record, and reaches the reader long before the record.
    """
    with stage(shards=2) as s:
        alice = Client(s, "alice", 0)
        base = s.fresh_epoch()
        reader = Reader(s, "reader", base)
        end = base + s.lease_at(base).epoch_size
        s.run(900 * MS)
        s.hold(PRIMARY, "reader", Deliver, until=s.now + 300 * MS)
        call = alice.wait(alice.insert(b"A"))
        (gsn,) = call.gsns
        assert base <= gsn < end
        s.run(250 * MS)
        assert any(start <= gsn < stop for start, stop in s.no_ops("shard-1-0"))
        assert s.said("shard-1-0", "reader", Deliver)[-1].frontier >= end
        assert (reader.delivered, reader.position) == ([], gsn)
        assert reader.until(1) == [(gsn, b"A")]
        s.until(lambda: reader.position >= end)
        assert reader.delivered == [(gsn, b"A")]


def guessed_in_an_ending_epoch(s: Stage) -> tuple[Client, Reader, Call, int, int]:
    """Let a record be at the backup only, in an epoch that the primary will end with a token.

    Returns its client, a reader, the call, the record's position there, and the epoch's end. The
    primary gets none of its copies until `heal`.
    """
    alice = Client(s, "alice")
    base = s.fresh_epoch()
    reader = Reader(s, "reader", base)  # while somebody reads, epochs end with a token
    s.lose("alice", PRIMARY, Insert)
    call = alice.insert(b"A")
    s.run(100 * MS)
    assert s.guesses(BACKUP) == {b"A": [base]}
    assert acks(s, BACKUP, alice)[-1] == (False, [base])
    return alice, reader, call, base, base + s.lease_at(base).epoch_size


def test_4_2_3_a_token_takes_the_position_from_a_record_that_only_a_backup_holds() -> None:
    """The thesis does not name this case; its rule for records decides it (4.2.4).

    'If in this process the backup overwrites some record R' it already held ..., no harm is done':
    its client 'could not have received an acknowledgment for that log position from the primary'.
    A no-op is the primary's word like any other (docs/protocol.md, section 4, rule 1). The record
    is then without a position, and the backup says nothing of it until the primary places it: in a
    later epoch, with everybody's ack.
    """
    with stage() as s:
        alice, reader, call, base, end = guessed_in_an_ending_epoch(s)
        s.until(lambda: s.no_ops(BACKUP) and s.no_ops(BACKUP)[-1][1] >= end, 2 * S)
        assert s.guesses(BACKUP) == {}
        assert s.log(BACKUP) == {}
        assert not call.ended
        told = len(acks(s, BACKUP, alice))
        (insert, *_) = s.said("alice", BACKUP, Insert)
        alice.send_again(insert, BACKUP, view=1)
        s.run(3 * DELAY_NS)
        assert len(acks(s, BACKUP, alice)) == told, "it has no position to name"
        s.until(lambda: reader.position >= end)
        assert reader.delivered == []

        s.heal()
        alice.wait(call)
        (gsn,) = call.gsns
        assert gsn >= end
        assert alice.paths == (0, 1)
        assert set(map(tuple, (g for _, g in acks(s, BACKUP, alice)[told:]))) == {(gsn,)}
        assert s.settle() == {gsn: b"A"}
        assert reader.until(1) == [(gsn, b"A")]
        assert base not in s.log(BACKUP)


def test_4_2_3_a_token_that_the_backup_heard_holds_after_a_recovery() -> None:
    """A reader was told that the position is empty: no recovery puts the record there."""
    with stage() as s:
        alice, reader, call, base, end = guessed_in_an_ending_epoch(s)
        s.until(lambda: reader.position >= end, 2 * S)
        die(s)
        alice.wait(call)
        (gsn,) = call.gsns
        assert gsn >= end
        assert s.settle() == {gsn: b"A"}
        assert reader.until(1) == [(gsn, b"A")]
        assert Reader(s, "another", base).until(1) == [(gsn, b"A")]


def test_4_2_3_a_token_that_the_backup_did_not_hear_is_not_yet_a_no_op() -> None:
    """Until the backup has let go of the record, nobody is told that the position is empty.

    The primary dies with its token; the backup's record is rolled forward at just that position,
    and the reader, which has waited in front of it, gets it.
    """
    with stage() as s:
        alice, reader, call, base, end = guessed_in_an_ending_epoch(s)
        s.lose(PRIMARY, BACKUP, Forward)
        s.until(lambda: s.no_ops(PRIMARY) and s.no_ops(PRIMARY)[-1][1] >= end, 2 * S)
        s.run(100 * MS)
        assert s.guesses(BACKUP) == {b"A": [base]}
        assert (reader.delivered, reader.position) == ([], base)

        die(s)
        alice.wait(call)
        assert call.gsns == [base]
        assert s.settle() == {base: b"A"}
        assert reader.until(1) == [(base, b"A")]
        s.until(lambda: reader.position >= end)
        assert reader.delivered == [(base, b"A")]


# --- what the scripts stand on ---


@pytest.mark.parametrize(
    ("fate", "arrives_at"),
    [(0, [0]), (7 * US, [7 * US]), (LOST, []), (None, [50 * US])],
)
def test_a_frames_fate_is_what_the_script_says(fate: int | None, arrives_at: list[int]) -> None:
    """The conditions count only where the script says nothing; a link that is cut stays cut."""
    kernel = Kernel(1)
    network = Network(kernel, Conditions(delay_ns=(50 * US, 50 * US)))
    asked: list[tuple[str, str, bytes]] = []
    arrived: list[int] = []
    began = kernel.now

    def decide(src: str, dst: str, frame: bytes) -> int | None:
        asked.append((src, dst, frame))
        return fate

    network.on_carry = decide
    network.carry("a", "b", b"frame", lambda: arrived.append(kernel.now - began))
    network.cut("a", "c")
    network.carry("a", "c", b"frame", lambda: arrived.append(-1))
    kernel.run(1 * S)
    assert arrived == arrives_at
    assert asked == [("a", "b", b"frame")]
