"""The model of a player's task: all invariants hold with all rules, one fails without each rule."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.command_line import refusal
from tests.model.explorer import explore
from tests.model.player.__main__ import main
from tests.model.player.player_model import INVARIANTS, Bounds, PlayerModel
from tests.model.player.rules import RULES
from tests.model.player.wording import STEPS, step_text

SPECIFICATION = Path(__file__).resolve().parents[3] / "docs" / "spec"
README = (SPECIFICATION / "player.md").read_text(encoding="utf-8")
MODULE = (SPECIFICATION / "Player.tla").read_text(encoding="utf-8")

USUAL = Bounds()
LOSS = Bounds(records=1, losses=1)
#: Steps that happen only with a rule switched off.
STEPS_WITHOUT_A_RULE = {"Tear"}
#: By switched-off rule: the bounds, and the number of states of the shortest trace.
TRACES = {
    "one-transaction": (USUAL, 6),
    "compare-start": (USUAL, 11),
    "compare-term": (USUAL, 9),
    "open-stores-term": (USUAL, 9),
    "open-again": (USUAL, 7),
    "effect-first": (USUAL, 6),
    "move-in-term": (USUAL, 8),
    "terms-grow": (USUAL, 3),
    "count-seeks": (USUAL, 10),
    "empty-is-lost": (LOSS, 11),
    "hold": (USUAL, 2),
}


class Search(NamedTuple):
    """A complete search: docs/spec/player.md has the same figures."""

    bounds: Bounds
    states: int
    depth: int


SEARCHES = [
    Search(Bounds(records=1), 9_525, 19),
    Search(Bounds(seeks=0), 22_598, 23),
    Search(USUAL, 55_622, 23),
    pytest.param(Search(LOSS, 82_806, 33), marks=pytest.mark.nightly),
]


def arguments_of(bounds: Bounds) -> list[str]:
    return [text for name, value in bounds._asdict().items() for text in (f"--{name}", str(value))]


@pytest.mark.parametrize("search", SEARCHES, ids=lambda search: "-".join(map(str, search.bounds)))
def test_with_all_rules_all_invariants_hold(search: Search) -> None:
    result = explore(PlayerModel(search.bounds))
    assert result.violation is None, result.violation
    assert result.is_complete
    assert (result.states, result.depth) == (search.states, search.depth)
    assert f"| {search.states:,} | {search.depth} |" in README


@pytest.mark.parametrize("rule", RULES)
def test_without_a_rule_its_invariant_is_violated(rule: str) -> None:
    bounds, length = TRACES[rule]
    violation = explore(PlayerModel(bounds, [rule])).violation
    assert violation is not None
    assert (violation.invariant, len(violation.trace)) == (RULES[rule].invariant, length)


def test_every_invariant_can_be_violated() -> None:
    assert {rule.invariant for rule in RULES.values()} == set(INVARIANTS)


def test_every_step_is_taken_and_has_a_text() -> None:
    model, taken = PlayerModel(Bounds(records=1, terms=2, losses=1)), set()
    level, seen = [model.initial()], {model.initial()}
    while level:
        state = level.pop()
        for step, following in model.successors(state):
            taken.add(step[0])
            assert "{" not in step_text(step)
            name = model.canonical(following)
            if name not in seen:
                seen.add(name)
                level.append(name)
    assert taken == STEPS - STEPS_WITHOUT_A_RULE


def test_a_trace_is_a_path_from_the_beginning() -> None:
    model = PlayerModel(off=["compare-start"])
    violation = explore(model).violation
    assert violation is not None
    trace = violation.trace
    assert trace[0] == (None, model.initial())
    for (_, state), pair in pairwise(trace):
        assert pair in list(model.successors(state))


# --- the documents ---


def test_the_page_has_the_rules() -> None:
    rows = re.findall(
        r"^\| `([a-z-]+)` \| (.*) \| `(\S+)` \| (\w+) \| (\d+) \|", README, re.MULTILINE
    )
    listed = [(rule, text, module, name, int(length)) for rule, text, module, name, length in rows]
    assert listed == [
        (name, rule.text, rule.module, rule.invariant, TRACES[name][1])
        for name, rule in RULES.items()
    ]
    assert all((SPECIFICATION.parents[1] / rule.module).is_file() for rule in RULES.values())


def test_the_specification_has_the_same_rules_and_invariants() -> None:
    rules = re.search(r"^Rules == \{(.*?)\}", MODULE, re.MULTILINE | re.DOTALL)
    assert rules is not None
    assert set(re.findall(r'"([a-z-]+)"', rules[1])) == set(RULES)
    assert set(re.findall(r'On\("([a-z-]+)"\)', MODULE)) == set(RULES)
    configuration = (SPECIFICATION / "Player.cfg").read_text(encoding="utf-8")
    checked = re.search(r"^INVARIANTS (.*)", configuration, re.MULTILINE)
    assert checked is not None
    assert set(checked[1].split()) == set(INVARIANTS)
    for name in INVARIANTS:
        assert re.search(rf"^{name} ==", MODULE, re.MULTILINE)


# --- the command ---


def test_the_command_says_that_all_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments_of(Bounds(records=1))) == 0
    printed = capsys.readouterr().out
    assert "9,525 states" in printed
    assert "all invariants hold" in printed


def test_the_command_shows_how_a_violation_comes_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments_of(Bounds(records=1)), "--off", "open-again"]) == 1
    printed = capsys.readouterr().out
    assert "  7. process 0: moves the cursor to 1" in printed
    assert "CursorBehind is violated now." in printed


def test_the_command_gives_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--max-states", "10"]) == 2
    assert "incomplete" in capsys.readouterr().out


def test_an_unknown_rule_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "sleep" in refusal(capsys, main, ["--off", "sleep"])
