"""Steps and states of the shard model in words, for people who read a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.model.parts import NONE, NOOP

if TYPE_CHECKING:
    from tests.model.explorer import Violation
    from tests.model.parts import Server, State, Step
    from tests.model.shard_model import ShardModel

_SERVERS: Final = ("primary", "backup 1", "backup 2")
_TEXTS: Final = {
    "Insert": "{0}: {1} comes from its client, and gets slot {2}; acked",
    "InsertAgain": "{0}: {1} comes from its client, is known, and is acked at slot {2}",
    "Skip": "{0}: slots {1} to {2} are decided to be no-ops",
    "Forward": "{0}: the primary's word comes, {1} is in slots {2} to {3}",
    "Report": "primary: all hold what is decided up to slot {0}",
    "Learn": "{0}: is told that all up to slot {1} is stable",
    "Hold": "{0}: takes all up to slot {1} for stable, as it holds it",
    "Crash": "{0}: crashes",
    "Restart": "{0}: restarts in its view, with what was stable",
    "HandlerCrash": "handler: its leader crashes, another one goes on from what is committed",
    "Begin": "handler: commits recovery {0}, with {1} as the candidate",
    "Acquire": "{0}: promises to store nothing more; the handler hears what it holds",
    "Decide": "handler: commits view {0}, which begins with what {1} held",
    "DecideAgain": "handler: a second one decides view {0}, with what {1} held",
    "Enter": "{1}: enters view {0}",
    "Confirm": "handler: commits that view {0} is confirmed",
    "Settle": "{0}: may tell what its view began with, up to slot {1}",
    "Finish": "handler: commits that view {0} is complete; the shard is back",
    "Grant": "membership service: grants epoch 2 to the shard, in view {0}",
    "Subscribe": "{0}: tells a subscriber its next slot, stable or not",
    "DeclareNoop": "membership service: says that slot {0} of the silent shard is a no-op",
    "OtherMoves": "other shard: its frontier passes its position",
    "HandOut": "subscriber: hands out slot {0}",
}
STEPS: Final = frozenset(_TEXTS)
#: They happen only when a rule is switched off.
STEPS_WITHOUT_A_RULE: Final = frozenset({"Restart", "DecideAgain", "Subscribe", "DeclareNoop"})
#: Which of a step's details is a server, and which one is what a slot holds.
_SERVER_AT: Final = {
    "Insert": 0, "InsertAgain": 0, "Skip": 0, "Forward": 0, "Learn": 0, "Hold": 0, "Crash": 0,
    "Restart": 0, "Begin": 1, "Acquire": 0, "Decide": 1, "DecideAgain": 1, "Enter": 1, "Settle": 0,
    "Subscribe": 0,
}  # fmt: skip
_VALUE_AT: Final = {"Insert": 1, "InsertAgain": 1, "Forward": 1}


def step_text(step: Step) -> str:
    """Return a step in words."""
    name, *details = step
    words = [str(detail) for detail in details]
    if name in _SERVER_AT:
        at = _SERVER_AT[name]
        words[at] = _SERVERS[details[at]]
    if name in _VALUE_AT:
        at = _VALUE_AT[name]
        words[at] = _value(details[at])
    return _TEXTS[name].format(*words)


def state_text(model: ShardModel, state: State) -> str:
    """Return the servers, and what subscribers were told, in one line.

    A guess has a question mark, a dead server is in parentheses, `|` is where epoch 2 begins.
    """
    servers = [
        _server(name, model.frame.servers.values[number], model.frame.bounds.epoch)
        for name, number in zip("PBC", state[: model.frame.bounds.servers], strict=False)
    ]
    told = "".join(_short(value) for value in model.frame.told_of(state))
    return "  ".join([*servers, f"told [{told}]"])


def violation_text(model: ShardModel, violation: Violation) -> str:
    """Return a whole trace, a line for each step and each state."""
    lines = []
    for number, (step, state) in enumerate(violation.trace, 1):
        text = "at the beginning" if step is None else step_text(step)
        lines += [f"{number:3}. {text}", f"       {state_text(model, state)}"]
    return "\n".join([*lines, f"Now {violation.invariant} does not hold."])


def _server(name: str, server: Server, epoch: int) -> str:
    slots = [
        _short(held) + ("?" if held != NONE and not server.decided >> gsn & 1 else "")
        for gsn, held in enumerate(server.slots, 1)
    ]
    row = " ".join(slots[:epoch]) + " | " + " ".join(slots[epoch:])
    frozen = f" frozen for {server.frozen}" if server.frozen else ""
    text = f"{name} view {server.view} [{row}] stable {server.stable}{frozen}"
    return text if server.is_alive else f"({text})"


def _value(value: int) -> str:
    return "a no-op" if value == NOOP else f"record {_short(value)}"


def _short(value: int) -> str:
    return {NONE: ".", NOOP: "-"}.get(value) or "abcdefgh"[value - 2]
