"""The replicated state: one decision for each recovery, for any commands in any order."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from failure_handler.state import (
    Attempt,
    Begin,
    Command,
    Confirm,
    Decide,
    Decision,
    Finish,
    HandlerState,
    decode_refusal,
)
from tests.properties import examples

DIGEST = b"d" * 16


def attempt(
    recovery: int, candidate: int = 0, incarnation: int = 7, base: int = 1, *, limbo: bool = False
) -> Attempt:
    return Attempt(recovery, candidate, incarnation, limbo, base)


def decide(
    recovery: int, survivor: int = 0, incarnation: int = 7, *, last: int = 9, confirmed: bool = True
) -> Decide:
    return Decide(0, recovery, Decision(survivor, incarnation, last, DIGEST, 0), confirmed)


def apply(state: HandlerState, *commands: Command) -> list[str]:
    refusals = []
    for command in commands:
        refusals.append(decode_refusal(state.apply(command.encode())))
        state.check()
    return refusals


def test_a_recovery_from_the_beginning_to_the_end() -> None:
    state = HandlerState()
    begin = Begin(0, 1, attempt(2))
    assert apply(state, begin, decide(2), Finish(0, 2)) == ["", "", ""]
    shard = state.shards[0]
    assert (shard.view, shard.confirmed, shard.is_finished, shard.is_under_way) == (
        2, 2, True, False
    )  # fmt: skip
    assert apply(state, Begin(0, 2, attempt(5, base=2))) == [""]
    assert state.shards[0].is_under_way


def test_every_command_that_comes_twice_counts_once() -> None:
    state = HandlerState()
    for command in (Begin(0, 1, attempt(2)), decide(2), Confirm(0, 2), Finish(0, 2)):
        assert apply(state, command) == [""]
        before = state.snapshot()
        assert apply(state, command) == [""] or isinstance(command, Begin)
        assert state.snapshot() == before


def test_an_attempt_needs_a_higher_number_and_the_current_view() -> None:
    state = HandlerState()
    assert apply(state, Begin(0, 3, attempt(3, base=3))) == ["old-recovery"]
    assert apply(state, Begin(0, 3, attempt(5, base=3))) == [""]
    assert apply(
        state,
        Begin(0, 3, attempt(5, candidate=1, base=3)),  # a number serves one candidate
        Begin(0, 3, attempt(5, incarnation=8, base=3)),
        Begin(0, 3, attempt(4, base=3)),
        Begin(0, 2, attempt(6, base=2)),
        Begin(0, 4, attempt(6, base=4)),
        Begin(0, 2, attempt(6, base=3)),
    ) == [*["old-recovery"] * 3, *["other-view"] * 3]
    assert state.shards[0].attempt == attempt(5, base=3)
    # After a decision, attempts from the former view are refused.
    assert apply(state, decide(5), Begin(0, 3, attempt(6, base=3))) == ["", "other-view"]


def test_only_the_newest_attempt_is_decided_and_once() -> None:
    state = HandlerState()
    apply(state, Begin(0, 1, attempt(2)), Begin(0, 1, attempt(3, candidate=1)))
    assert apply(state, decide(2)) == ["old-recovery"]
    assert apply(state, decide(3)) == ["other-survivor"]
    assert apply(state, decide(3, 1, 8)) == ["other-survivor"]
    assert apply(state, decide(3, 1), decide(3, 1)) == ["", ""]
    assert apply(state, decide(3, 1, last=10)) == ["old-recovery"]
    assert state.shards[0].decision == decide(3, 1).decision
    assert apply(state, decide(4)) == ["old-recovery"]
    assert apply(HandlerState(), decide(2)) == ["old-recovery"]


def test_nothing_is_finished_or_confirmed_that_is_under_way_or_over() -> None:
    state = HandlerState()
    assert apply(state, Finish(0, 1), Confirm(0, 1)) == ["other-view", "other-view"]
    apply(state, Begin(0, 1, attempt(2)), decide(2, confirmed=False))
    assert apply(state, Finish(0, 1), Confirm(0, 3)) == ["other-view", "other-view"]
    apply(state, Begin(0, 2, attempt(3, base=2)))
    assert apply(state, Finish(0, 2), Confirm(0, 2)) == ["old-recovery", "old-recovery"]
    assert not state.shards[0].is_finished


def test_no_recovery_goes_back_before_a_confirmed_view() -> None:
    state = HandlerState()
    apply(state, Begin(0, 1, attempt(2)), decide(2, confirmed=False))
    assert state.shards[0].confirmed == 1
    # The survivor of view 2 is gone, and reported no result: a witness of view 1 may be chosen.
    assert apply(state, Begin(0, 2, attempt(3, base=1))) == [""]
    assert apply(state, decide(3, confirmed=False)) == [""]
    assert apply(state, Confirm(0, 3)) == [""]
    assert apply(
        state,
        Begin(0, 3, attempt(4, base=2)),
        Begin(0, 3, attempt(4, base=4)),
        Begin(0, 3, attempt(4, base=2, limbo=True)),  # all are in limbo: their disks count
    ) == ["other-view", "other-view", ""]
    state = HandlerState()
    assert apply(state, Begin(0, 1, attempt(2, base=0))) == ["other-view"]
    apply(state, Begin(0, 1, attempt(2)), decide(2, confirmed=False), Finish(0, 2))
    assert state.shards[0].confirmed == 2


def test_shards_do_not_disturb_each_other() -> None:
    state = HandlerState()
    for shard in (5, 3, 9):
        assert apply(state, Begin(shard, 1, attempt(2 + shard))) == [""]
    assert {n: s.attempt.recovery for n, s in state.shards.items()} == {3: 5, 5: 7, 9: 11}


def test_the_number_of_shards_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("failure_handler.state.MAX_SHARDS", 2)
    state = HandlerState()
    assert apply(state, *(Begin(shard, 1, attempt(2)) for shard in range(3))) == [
        "", "", "too-many-shards"
    ]  # fmt: skip


COMMANDS = st.one_of(
    st.builds(
        Begin,
        st.integers(0, 1),
        st.integers(1, 4),
        st.builds(
            Attempt, st.integers(1, 6), st.integers(0, 2), st.integers(0, 1), st.booleans(),
            st.integers(0, 4),
        ),
    ),
    st.builds(
        Decide,
        st.integers(0, 1),
        st.integers(1, 6),
        st.builds(
            Decision, st.integers(0, 2), st.integers(0, 1), st.integers(0, 2), st.just(DIGEST),
            st.integers(0, 1),
        ),
        st.booleans(),
    ),
    st.builds(Confirm, st.integers(0, 1), st.integers(1, 6)),
    st.builds(Finish, st.integers(0, 1), st.integers(1, 6)),
)  # fmt: skip


@examples(300)
@given(st.lists(COMMANDS, max_size=40))
def test_a_view_is_decided_once_and_never_goes_back(commands: list[Command]) -> None:
    state = HandlerState()
    decided: dict[tuple[int, int], Decision] = {}
    attempts: dict[tuple[int, int], Attempt] = {}
    views: dict[int, int] = {}
    for command in commands:
        before = state.snapshot()
        (refusal,) = apply(state, command)
        assert not refusal or state.snapshot() == before
        for number, shard in state.shards.items():
            assert shard.view >= views.get(number, 0)
            views[number] = shard.view
            key = (number, shard.attempt.recovery)
            assert attempts.setdefault(key, shard.attempt) == shard.attempt
            if shard.decision is not None:
                key = (number, shard.view)
                assert decided.setdefault(key, shard.decision) == shard.decision
                assert shard.decision.survivor == attempts[key].candidate
    copy = HandlerState()
    copy.restore(state.snapshot())
    copy.check()
    assert copy.snapshot() == state.snapshot()


@given(st.binary(max_size=100))
def test_any_bytes_are_refused_and_change_nothing(command: bytes) -> None:
    state = HandlerState()
    apply(state, Begin(0, 1, attempt(2)))
    before = state.snapshot()
    if decode_refusal(state.apply(command)):
        assert state.snapshot() == before
    state.check()


def test_a_snapshot_that_is_none_is_an_error() -> None:
    with pytest.raises(msgspec.MsgspecError):
        HandlerState().restore(b"nonsense")
