"""The shard model: all invariants hold with all rules, and one fails without each rule."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.command_line import refusal
from tests.model.__main__ import main
from tests.model.explorer import Result, explore
from tests.model.invariants import INVARIANTS
from tests.model.parts import Bounds
from tests.model.rules import RULES
from tests.model.shard_model import ShardModel
from tests.model.wording import STEPS, STEPS_WITHOUT_A_RULE

if TYPE_CHECKING:
    from tests.model.parts import State

SPECIFICATION = Path(__file__).resolve().parents[2] / "docs" / "spec"
README = (SPECIFICATION / "README.md").read_text(encoding="utf-8")
MODULE = (SPECIFICATION / "Shard.tla").read_text(encoding="utf-8")

TINY = Bounds(records=1, positions=2, epoch=1)
SMALL = Bounds(records=1, positions=3)
USUAL = Bounds()
TWO_RECOVERIES = Bounds(records=1, positions=2, epoch=2, views=3)
THREE_SMALL = Bounds(records=1, positions=1, epoch=1, servers=3, views=3)
THREE_SERVERS = Bounds(records=1, positions=2, epoch=2, servers=3, views=3)
APPEND = Bounds(positions=2, append=1)
MERGE = Bounds(records=1, positions=2, epoch=2, merge=True)


class Search(NamedTuple):
    """A complete search: docs/spec/README.md has the same figures."""

    bounds: Bounds
    states: int
    depth: int


#: A search of more states takes half a minute, and runs at night.
MOST_STATES = 100_000
QUICK = [
    Search(TINY, 5_187, 17),
    Search(SMALL, 19_881, 20),
    Search(Bounds(records=2, positions=2, epoch=1), 16_592, 19),
    Search(Bounds(records=1, positions=2, epoch=2, views=3, crashes=2), 13_760, 24),
    Search(MERGE, 13_672, 18),
    Search(APPEND, 11_522, 18),
    Search(Bounds(records=1, positions=1, epoch=1, servers=3), 10_298, 18),
]
LONGER = [
    Search(USUAL, 112_811, 23),
    Search(Bounds(records=1, positions=3, views=3, crashes=2), 91_837, 29),
    Search(Bounds(records=1, positions=2, epoch=2, servers=3), 111_412, 24),
    Search(THREE_SMALL, 185_881, 28),
    Search(Bounds(append=2), 60_418, 23),
]
#: One server of three may confirm a view, as an operator gave up the regions of the others.
ALONE = [
    Search(Bounds(records=1, positions=1, epoch=1, servers=3, crashes=2, alone=True), 21_663, 18),
    Search(THREE_SMALL._replace(alone=True), 205_753, 27),
]
#: By switched-off rule: the bounds, and the number of states of the shortest trace.
TRACES = {
    "no-reslot": (USUAL, 6),
    "restart-is-failure": (USUAL, 5),
    "roll-forward-guesses": (USUAL, 7),
    "freeze": (USUAL, 7),
    "views": (USUAL, 9),
    "stable-reads": (USUAL, 4),
    "decided-only": (USUAL, 3),
    "two-copies": (THREE_SMALL, 8),
    "one-decision": (USUAL, 8),
    "remove-copies": (USUAL, 9),
    "recognise": (USUAL, 8),
    "gapless-stream": (USUAL, 5),
    "token": (USUAL, 5),
    "closed-epoch": (USUAL, 5),
    "primary-noops": (USUAL, 3),
    "announced-epochs": (USUAL, 9),
    "noop-after-freeze": (USUAL, 5),
    "durable-decision": (USUAL, 11),
    "no-way-back": (TWO_RECOVERIES, 10),
    "separate-recoveries": (THREE_SMALL, 13),
    "confirm": (THREE_SERVERS, 10),
    "least-frontier": (MERGE, 6),
    "told-decided": (APPEND, 8),
    "told-members": (APPEND, 4),
    "told-frozen": (APPEND, 5),
    "told-guess": (APPEND, 4),
}


def name_of(search: Search) -> str:
    return "-".join(f"{key}{value:d}" for key, value in search.bounds._asdict().items())


def figures(result: Result) -> tuple[int, int]:
    return result.states, result.depth


def assert_holds(search: Search) -> None:
    result = explore(ShardModel(search.bounds))
    assert result.violation is None, result.violation
    assert result.is_complete
    assert figures(result) == (search.states, search.depth)


@pytest.mark.parametrize("search", [*QUICK, ALONE[0]], ids=name_of)
def test_with_all_rules_all_invariants_hold(search: Search) -> None:
    assert_holds(search)


@pytest.mark.parametrize(
    "search",
    [
        pytest.param(search, marks=pytest.mark.nightly if search.states > MOST_STATES else ())
        for search in (*LONGER, ALONE[1])
    ],
    ids=name_of,
)
def test_with_all_rules_all_invariants_hold_in_larger_models(search: Search) -> None:
    assert_holds(search)


@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_its_invariant_is_violated(rule: str) -> None:
    bounds, length = TRACES[rule]
    result = explore(ShardModel(bounds, [rule], [RULES[rule].invariant]))
    assert result.violation is not None
    assert result.violation.invariant == RULES[rule].invariant
    assert len(result.violation.trace) == length


def test_a_view_that_one_server_confirms_is_never_given_up() -> None:
    """Otherwise a server that returns in its old view takes back what was delivered."""
    bounds = THREE_SMALL._replace(alone=True)
    result = explore(ShardModel(bounds, ["no-way-back"], ["DelivAgree"]))
    assert result.violation is not None
    assert len(result.violation.trace) == 12


def test_a_decision_changes_if_a_closed_epoch_accepts_a_late_record() -> None:
    result = explore(ShardModel(USUAL, ["closed-epoch"], ["DecidedStays"]))
    assert result.violation is not None
    steps = sorted(step[0] for step, _ in result.violation.trace[1:])
    assert steps == ["Forward", "Insert", "Skip"]


def test_every_invariant_can_be_violated() -> None:
    assert {rule.invariant for rule in RULES.values()} | {"DecidedStays"} == set(INVARIANTS)


def states_of(model: ShardModel) -> tuple[set[State], set[str]]:
    """Return all states, without symmetry, and the names of all steps."""
    level = [model.initial()]
    found, names = set(level), set()
    while level:
        following = []
        for state in level:
            for step, new in model.successors(state):
                names.add(step[0])
                if new not in found:
                    found.add(new)
                    following.append(new)
        level = following
    return found, names


def test_every_step_is_taken() -> None:
    three = Bounds(records=1, positions=1, epoch=1, servers=3, crashes=0)
    taken: set[str] = set()
    for bounds in (SMALL, MERGE, APPEND, three):
        taken |= states_of(ShardModel(bounds))[1]
    assert taken == STEPS - STEPS_WITHOUT_A_RULE


def test_states_that_differ_in_names_only_are_one() -> None:
    bounds = Bounds(records=2, positions=2, epoch=1)
    model = ShardModel(bounds)
    states, _ = states_of(model)
    assert len(states) == explore(ShardModel(bounds, symmetry=False)).states == 32_503
    assert len({model.canonical(state) for state in states}) == explore(model).states == 16_592


def test_the_model_reaches_what_it_is_about() -> None:
    """A record acked in epoch 2 of each view, all of it delivered, after a recovery."""
    model = ShardModel(SMALL)
    frame = model.frame
    seen = set()
    for state in states_of(model)[0]:
        control = frame.control_of(state)
        if (2, 3) in frame.completed(state[frame.acks]) and len(frame.delivered_in(state)) == 3:
            seen.add((control.view, control.grant))
    assert seen == {(1, 1), (2, 1), (2, 2)}


def test_a_trace_begins_at_the_beginning_and_keeps_its_names() -> None:
    model = ShardModel(USUAL, ["remove-copies"], ["NoDup"])
    result = explore(model)
    assert result.violation is not None
    trace = result.violation.trace
    assert trace[0] == (None, model.initial())
    for (_, state), (step, following) in pairwise(trace):
        assert (step, following) in model.successors(state)
    assert model.violated(trace[-1][1]) == "NoDup"


# --- the documents ---


def test_the_readme_has_the_rules() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \|.*\| ([A-Z]\w+) \| (\d+) \|", README, re.MULTILINE)
    delivered = [(rule, invariant, int(length)) for rule, invariant, length in rows]
    assert delivered == [(name, rule.invariant, TRACES[name][1]) for name, rule in RULES.items()]


def test_the_readme_names_decisions_and_modules() -> None:
    root = SPECIFICATION.parents[1]
    for name, rule in RULES.items():
        (row,) = (line for line in README.splitlines() if line.startswith(f"| `{name}` |"))
        assert rule.decisions in row
        assert f"`{rule.module}`" in row
        assert (root / rule.module).is_file()


def test_the_readme_has_the_figures() -> None:
    for search in QUICK + LONGER + ALONE:
        assert f"| {search.states:,} | {search.depth} |" in README


def test_the_specification_has_the_same_rules_and_invariants() -> None:
    rules = re.search(r"^Rules == \{(.*?)\}", MODULE, re.MULTILINE | re.DOTALL)
    assert rules is not None
    assert set(re.findall(r'"([a-z-]+)"', rules[1])) == set(RULES)
    assert set(re.findall(r'On\("([a-z-]+)"\)', MODULE)) == set(RULES)
    configuration = (SPECIFICATION / "Shard.cfg").read_text(encoding="utf-8")
    checked = re.search(r"^INVARIANTS (.*)", configuration, re.MULTILINE)
    assert checked is not None
    assert set(checked[1].split()) == set(INVARIANTS)
    for name in INVARIANTS:
        assert re.search(rf"^{name} ==", MODULE, re.MULTILINE)


# --- the command ---


def test_the_command_says_that_all_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--records", "1", "--positions", "2", "--epoch", "1"]) == 0
    printed = capsys.readouterr().out
    assert "5,187 states" in printed
    assert "all invariants hold" in printed


def test_the_command_shows_how_a_violation_comes_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--off", "freeze", "--invariant", "AckedStays"]) == 1
    printed = capsys.readouterr().out
    assert "freezes" in printed
    assert "  7. " in printed
    assert "AckedStays is violated now." in printed


@pytest.mark.parametrize("rule", RULES)
def test_every_trace_can_be_read(rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    bounds, length = TRACES[rule]
    arguments = [
        text
        for name, value in bounds._asdict().items()
        if name not in {"merge", "alone"}
        for text in (f"--{name}", str(value))
    ]
    more = ["--merge"] if bounds.merge else []
    wanted = ["--off", rule, "--invariant", RULES[rule].invariant]
    assert main([*arguments, *more, *wanted]) == 1
    assert len(re.findall(r"^ *\d+\. ", capsys.readouterr().out, re.MULTILINE)) == length


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--views", "0"], "--views: '0' is no number from 1 on"),
        (["--crashes", "-1"], "--crashes: '-1' is no number from 0 on"),
        (["--positions", "2", "--epoch", "3"], "--epoch is from 1 to --positions"),
        (["--append", "4"], "--append is from 0 to --positions"),
        (["--off", "gravity"], "--off: invalid choice: 'gravity'"),
    ],
)
def test_invalid_options_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert reason in refusal(capsys, main, arguments)


def test_the_command_gives_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--max-states", "100"]) == 2
    assert "incomplete" in capsys.readouterr().out
