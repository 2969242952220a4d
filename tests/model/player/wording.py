"""Text of steps and states of the model of a player's task, for readers of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.model.explorer import Violation
    from tests.model.player.player_model import State, Step

_TEXTS: Final = {
    "Claim": "process {0}: claims the cursor",
    "End": "process {0}: ends",
    "Move": "process {0}: moves the cursor to {1}",
    "Seek": "operator: seeks the cursor to {0}",
    "Trim": "operator: trims the log up to {0}",
    "Lose": "target: loses all that it has",
    "SendOpen": "process {0}: opens the target",
    "Send": "process {0}: sends the records up to {1}",
    "TimeOut": "process {0}: waits no longer for its step",
    "Open": "target: is opened by process {0}",
    "Deliver": "target: stores the batch of process {0}, and the position",
    "Tear": "target: stores the batch of process {0}, without the position",
    "Refuse": "target: refuses the step of process {0}",
}
STEPS: Final = frozenset(_TEXTS)


def step_text(step: Step) -> str:
    """Return a step's text."""
    name, *details = step
    text = _TEXTS[str(name)].format(*details)
    return f"{text}; the answer is lost" if "lost" in details else text


def state_text(state: State) -> str:
    """Return the cursor and the target in one line."""
    cursor, row = state.cursor, state.row
    target = "empty" if row is None else f"term {row.term}, position {row.position}"
    return (
        f"cursor: term {cursor.term}, position {cursor.position}; target: {target}, records"
        f" {list(state.effects)}"
    )


def violation_text(violation: Violation) -> str:
    """Return a trace, a line for each step and each state."""
    lines = []
    for number, (step, state) in enumerate(violation.trace, 1):
        text = "at the beginning" if step is None else step_text(step)
        lines += [f"{number:3}. {text}", f"       {state_text(state)}"]
    return "\n".join([*lines, f"{violation.invariant} is violated now."])
