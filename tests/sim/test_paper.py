"""The thesis' cases as scripts: real servers, services and clients in virtual time.

Quotations are from Cong Ding, *Building a Scalable Shared Log* (Cornell 2020), chapter 4. A script
delays or loses single frames on purpose; all others take `DELAY_NS`. It then asserts the result of
every participant: positions, acks and their message delays, both replicas' logs, deliveries to
readers. Fig. 4.2 has a file of its own (test_paper_schedule).
"""

from __future__ import annotations

from tests.sim.script import DELAY_NS, Call, Client, Reader, Stage, stage
from tests.simulator.kernel import MS, US, S
from ziplog.wire import Deliver, Forward, Insert, InsertAck, Locate, Refused, RelayedInsert, Resend

PRIMARY, BACKUP = "shard-0-0", "shard-0-1"


def acks(s: Stage, server: str, client: Client) -> list[tuple[bool, list[int]]]:
    """Return a server's acks to a client: whether each was decided, and the positions."""
    return [(ack.confirmed, ack.gsns) for ack in s.messages(server, client.name, InsertAck)]


# --- 4.2.4 Replication: Fig. 4.3 ---


def test_fig_4_3_a_identical_gsns() -> None:
    """'The client receives identical gsns': done 'after two message delays'.

    The primary's forward reaches the backup afterwards: 'no further action is needed'.
    """
    with stage() as s:
        alice = Client(s, "alice")
        base = s.fresh_epoch()
        call = alice.wait(alice.insert(b"A"))
        assert (call.gsns, call.delays, alice.paths) == ([base], 2, (1, 0))
        (forward,) = s.messages(PRIMARY, BACKUP, Forward)
        assert forward.decisions[-1].gsns == [base]
        assert s.guesses(BACKUP) == {b"A": [base]}, "done before the forward reached the backup"

        assert s.settle() == {base: b"A"}
        assert s.guesses(BACKUP) == {}
        assert acks(s, PRIMARY, alice) == [(True, [base])]
        assert acks(s, BACKUP, alice) == [(False, [base])], "one ack was due"
        assert alice.read(base) == b"A"


def cross(s: Stage, alice: Client, bob: Client) -> tuple[Call, Call]:
    """Let two clients insert: the primary receives alice first, the backup receives bob first.

    Alice's copy takes longer to the backup, bob's to the primary; nothing else differs.
    """
    s.delay(alice.name, BACKUP, Insert, 20 * US, count=1)
    s.delay(bob.name, PRIMARY, Insert, 20 * US, count=1)
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
        assert not a.ended, "two different acks are no answer"
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


def test_fig_4_3_b_the_primarys_decisions_arrive_out_of_order() -> None:
    """Forwards overtake each other: the backup still applies them in the primary's order.

    An early forward waits; before the first one arrives, no client receives a new ack.
    """
    with stage() as s:
        alice, bob = Client(s, "alice"), Client(s, "bob")
        base = s.fresh_epoch()
        s.delay(PRIMARY, BACKUP, Forward, 1 * MS, count=1)
        s.lose(
            BACKUP, PRIMARY, Resend
        )  # otherwise it would request the first one, and receive it sooner
        a, b = cross(s, alice, bob)
        s.run(4 * DELAY_NS)
        assert len(s.messages(PRIMARY, BACKUP, Forward)) == 2
        assert s.guesses(BACKUP) == {b"B": [base], b"A": [base + 1]}, "the second forward waits"
        assert not a.ended
        assert not b.ended
        alice.wait(a)
        bob.wait(b)
        assert (a.gsns, b.gsns) == ([base], [base + 1])
        assert (alice.paths, bob.paths) == ((0, 1), (0, 1))
        assert s.settle() == {base: b"A", base + 1: b"B"}


def test_fig_4_3_b_an_epoch_ends_between_the_two_copies() -> None:
    """The backup guesses in one epoch; the primary's copy is late, and it decides in the next.

    The guess stays until the primary's no-ops for the rest of the epoch take its position. The
    client waits for a position that all acks have.
    """
    with stage() as s:
        alice = Client(s, "alice")
        base = s.fresh_epoch()
        size = s.lease_at(base).epoch_size
        s.hold("alice", PRIMARY, Insert, until=s.now + 1100 * MS)
        s.lose(BACKUP, PRIMARY, RelayedInsert)
        call = alice.insert(b"A")
        s.run(1050 * MS)
        assert s.guesses(BACKUP) == {b"A": [base]}, "no timeout moves it"
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
    """Kill a server; the supervisor restarts it soon; its links are healed."""
    s.cluster.nodes[server].kill()
    s.heal()


def copies(log: dict[int, bytes], payload: bytes) -> list[int]:
    """Return the positions of a record."""
    return [gsn for gsn, held in log.items() if held == payload]


def test_4_2_5_a_record_that_was_acknowledged_keeps_its_one_position() -> None:
    """'recovery must necessarily roll forward', and 'servers reject duplicate records'.

    Two acks complete the insert; the primary dies before its forward reaches the backup. Copies of
    the record arrive during and after the recovery, in the former and in the new view: none of them
    is placed, and every ack has the same position.
    """
    with stage() as s:
        alice = Client(s, "alice")
        base = s.fresh_epoch()
        s.lose(PRIMARY, BACKUP, Forward)
        call = alice.wait(alice.insert(b"A"))
        assert (call.gsns, call.delays) == ([base], 2)
        assert s.log(BACKUP) == {}, "it has only its own guess"
        (insert,) = s.messages("alice", BACKUP, Insert)
        die(s)
        s.until(lambda: s.state(BACKUP).server_state == "frozen")
        acked = len(acks(s, BACKUP, alice))
        alice.send_again(insert, BACKUP, view=1)
        s.run(3 * DELAY_NS)
        assert len(acks(s, BACKUP, alice)) == acked, "a frozen server acks nothing"

        assert s.settle() == {base: b"A"}
        before = s.decisions(BACKUP)
        view = s.state(BACKUP).view
        assert view > 1
        for server in (PRIMARY, BACKUP):
            refused = len(s.messages(server, "alice", Refused))
            alice.send_again(insert, server, view=1)
            s.run(3 * DELAY_NS)
            assert [r.code for r in s.messages(server, "alice", Refused)[refused:]] == [
                "wrong-view"
            ]
            acked = len(acks(s, server, alice))
            alice.send_again(insert, server, view=view)
            s.run(3 * DELAY_NS)
            assert acks(s, server, alice)[acked:] == [(True, [base])]
        s.settle()
        assert s.decisions(BACKUP) == before
        assert alice.read(base) == b"A"


def test_4_2_5_a_record_that_only_the_backup_placed_is_rolled_forward() -> None:
    """'filled (may or may not be stable)': the survivor cannot know, so the record stays.

    The primary never received it. The client retransmits it before, during and after the recovery,
    and receives the position at which the backup held it.
    """
    with stage() as s:
        alice = Client(s, "alice")
        base = s.fresh_epoch()
        s.lose("alice", PRIMARY, Insert)
        call = alice.insert(b"A")
        s.run(50 * MS)
        assert acks(s, BACKUP, alice)[-1] == (False, [base])
        assert s.log(PRIMARY) == {}

        def ack_count() -> int:
            return len(s.messages("alice", BACKUP, Insert)) + len(
                s.messages("alice", BACKUP, Locate)
            )

        s.until(lambda: ack_count() > 1)
        die(s)
        s.until(lambda: s.state(BACKUP).server_state == "frozen")
        alice.send_again(s.messages("alice", BACKUP, Insert)[0], BACKUP, view=1)
        while_down = ack_count()
        assert s.settle() == {base: b"A"}
        alice.wait(call)
        assert ack_count() > while_down
        assert call.gsns == [base]
        assert Reader(s, "reader", base).until(1) == [(base, b"A")]
        assert s.settle() == {base: b"A"}


def test_4_2_5_a_client_with_a_lost_ack_is_answered_after_the_recovery() -> None:
    """Both replicas have the record, decided and stable; only the client lacks an ack."""
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
    is overwritten; the primary's decision about it is lost with the primary, so it is absent, and
    bob inserts it again: also once.
    """
    with stage() as s:
        alice, bob = Client(s, "alice"), Client(s, "bob")
        base = s.fresh_epoch()
        a, b = cross(s, alice, bob)
        s.delay(PRIMARY, BACKUP, Forward, 50 * US, count=1)  # first the guess, then the decision
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
        assert b.gsns[0] > base + 1, "all positions granted to the former view are decided"
        assert Reader(s, "reader", base).until(2) == [(base, b"A"), (b.gsns[0], b"B")]
        assert any(start <= base + 1 < stop for start, stop in s.no_ops(PRIMARY))


def test_4_2_5_the_primarys_decisions_count_if_the_backup_received_all() -> None:
    """As the duplicate, but both forwards arrived: the log is the primary's, guesses are dropped.

    Bob's record was at the first position and is at the second one: copies after and before the
    primary's choice are removed. The primary dies before the clients receive an answer.
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
    """The backup's guesses and the primary's decisions differ, and no forward arrives.

    Each client has two acks with different positions, so no insert is complete. The survivor's
    entries are rolled forward. The former primary has the opposite order on disk, and drops it.
    """
    with stage() as s:
        alice, bob = Client(s, "alice"), Client(s, "bob")
        base = s.fresh_epoch()
        s.lose(PRIMARY, BACKUP, Forward)
        a, b = cross(s, alice, bob)
        s.run(15 * MS)  # the entry is on the primary's disk by now
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


def test_4_2_3_a_token_does_not_cover_other_shards_positions() -> None:
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
        s.hold(BACKUP, "reader", Deliver, until=s.now + 300 * MS)
        call = alice.wait(alice.insert(b"A"))
        (gsn,) = call.gsns
        assert base <= gsn < end
        s.run(250 * MS)
        assert any(start <= gsn < stop for start, stop in s.no_ops("shard-1-0"))
        assert s.messages("shard-1-1", "reader", Deliver)[-1].frontier >= end
        assert (reader.delivered, reader.position) == ([], gsn)
        assert reader.until(1) == [(gsn, b"A")]
        s.until(lambda: reader.position >= end)
        assert reader.delivered == [(gsn, b"A")]


def guessed_in_an_ending_epoch(s: Stage) -> tuple[Client, Reader, Call, int, int]:
    """Place a record at the backup only, in an epoch that the primary will end with a token.

    Return its client, a reader, the call, the record's position there, and the epoch's end. The
    primary receives none of its copies until `heal`.
    """
    alice = Client(s, "alice")
    base = s.fresh_epoch()
    reader = Reader(s, "reader", base)  # while a reader waits, epochs end with a token
    s.lose("alice", PRIMARY, Insert)
    s.lose(BACKUP, PRIMARY, RelayedInsert)
    call = alice.insert(b"A")
    s.run(100 * MS)
    assert s.guesses(BACKUP) == {b"A": [base]}
    assert acks(s, BACKUP, alice)[-1] == (False, [base])
    return alice, reader, call, base, base + s.lease_at(base).epoch_size


def test_4_2_3_a_token_takes_the_position_from_a_record_that_only_a_backup_holds() -> None:
    """The thesis does not name this case; its rule for records decides it (4.2.4).

    'If in this process the backup overwrites some record R' it already held ..., no harm is done':
    its client 'could not have received an acknowledgment for that log position from the primary'.
    A no-op is a decision like any other (docs/protocol.md, section 4, rule 1). The record then has
    no position, and the backup sends no ack until the primary places it: in a later epoch, with the
    acks of all replicas.
    """
    with stage() as s:
        alice, reader, call, base, end = guessed_in_an_ending_epoch(s)
        s.until(lambda: s.no_ops(BACKUP) and s.no_ops(BACKUP)[-1][1] >= end, 2 * S)
        assert s.guesses(BACKUP) == {}
        assert s.log(BACKUP) == {}
        assert not call.ended
        acked = len(acks(s, BACKUP, alice))
        (insert, *_) = s.messages("alice", BACKUP, Insert)
        alice.send_again(insert, BACKUP, view=1)
        s.run(3 * DELAY_NS)
        assert len(acks(s, BACKUP, alice)) == acked, "it has no position to ack"
        s.until(lambda: reader.position >= end)
        assert reader.delivered == []

        s.heal()
        alice.wait(call)
        (gsn,) = call.gsns
        assert gsn >= end
        assert alice.paths == (0, 1)
        assert set(map(tuple, (g for _, g in acks(s, BACKUP, alice)[acked:]))) == {(gsn,)}
        assert s.settle() == {gsn: b"A"}
        assert reader.until(1) == [(gsn, b"A")]
        assert base not in s.log(BACKUP)


def test_4_2_3_a_token_that_the_backup_received_holds_after_a_recovery() -> None:
    """A reader learned that the position is empty: no recovery places the record there."""
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


def test_4_2_3_a_token_that_the_backup_did_not_receive_is_not_yet_a_no_op() -> None:
    """No reader learns that the position is empty while the backup still holds the record.

    The primary dies with its token; the recovery rolls the backup's record forward at that
    position, and the waiting reader receives it.
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
