"""Text of steps and states of the shard model, for readers of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.model.parts import NONE, NOOP

if TYPE_CHECKING:
    from tests.model.explorer import Violation
    from tests.model.parts import Server, State, Step
    from tests.model.shard_model import ShardModel

_SERVERS: Final = ("primary", "backup 1", "backup 2")
_TEXTS: Final = {
    "Insert": "{0}: {1} arrives from its client, and gets slot {2}; acked",
    "InsertAgain": "{0}: {1} arrives from its client again, and is acked at slot {2}",
    "Skip": "{0}: decides slots {1} to {2} to be no-ops",
    "Forward": "{0}: a forward arrives, {1} is in slots {2} to {3}",
    "Report": "primary: all replicas hold the decisions up to slot {0}",
    "Learn": "{0}: learns that all slots up to {1} are stable",
    "Hold": "{0}: treats all slots up to {1} as stable, as it holds them",
    "Crash": "{0}: crashes",
    "Restart": "{0}: restarts in its view, with its stable entries",
    "HandlerCrash": "handler: its leader crashes, another one continues from the committed state",
    "Begin": "handler: commits recovery {0}, with {1} as the candidate",
    "Acquire": "{0}: freezes; the handler receives its state",
    "Decide": "handler: commits view {0}, which starts with the state of {1}",
    "DecideAgain": "handler: a second one decides view {0}, with the state of {1}",
    "Enter": "{1}: enters view {0}",
    "Confirm": "handler: commits that view {0} is confirmed",
    "Settle": "{0}: may serve the start state of its view, up to slot {1}",
    "Finish": "handler: commits that view {0} is complete; the shard is back",
    "Grant": "membership service: grants epoch 2 to the shard, in view {0}",
    "Subscribe": "{0}: sends a subscriber its next slot, stable or not",
    "DeclareNoop": "membership service: declares slot {0} of the silent shard a no-op",
    "OtherMoves": "other shard: its frontier passes its position",
    "HandOut": "subscriber: delivers slot {0}",
    "Answer": "other shard: its append right after our slot {0} returns",
}
STEPS: Final = frozenset(_TEXTS)
#: Steps that happen only with a rule switched off.
STEPS_WITHOUT_A_RULE: Final = frozenset({"Restart", "DecideAgain", "Subscribe", "DeclareNoop"})
#: The indices of a step's details that are a server, and the content of a slot.
_SERVER_AT: Final = {
    "Insert": 0, "InsertAgain": 0, "Skip": 0, "Forward": 0, "Learn": 0, "Hold": 0, "Crash": 0,
    "Restart": 0, "Begin": 1, "Acquire": 0, "Decide": 1, "DecideAgain": 1, "Enter": 1, "Settle": 0,
    "Subscribe": 0,
}  # fmt: skip
_VALUE_AT: Final = {"Insert": 1, "InsertAgain": 1, "Forward": 1}


def step_text(step: Step) -> str:
    """Return a step's text."""
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
    """Return the servers and the deliveries in one line.

    A guess has a question mark, a dead server is in parentheses, `|` marks the start of epoch 2.
    """
    servers = [
        _server(name, model.frame.servers.values[number], model.frame.bounds.epoch)
        for name, number in zip("PBC", state[: model.frame.bounds.servers], strict=False)
    ]
    delivered = "".join(_short(value) for value in model.frame.delivered_in(state))
    return "  ".join([*servers, f"delivered [{delivered}]"])


def violation_text(model: ShardModel, violation: Violation) -> str:
    """Return a trace, a line for each step and each state."""
    lines = []
    for number, (step, state) in enumerate(violation.trace, 1):
        text = "at the beginning" if step is None else step_text(step)
        lines += [f"{number:3}. {text}", f"       {state_text(model, state)}"]
    return "\n".join([*lines, f"{violation.invariant} is violated now."])


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
