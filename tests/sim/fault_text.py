"""Text form of faults and changes, for `python -m tests.sim --faults`.

`2150 kill shard-0-1; 2200 add-shard shard-3; ...`

Rule: `str` of a fault is a text of the same fault; an invalid text is refused with the reason.
`tests.sim.faults` decides whether a fault fits at its time.
"""

from __future__ import annotations

import re
from itertools import permutations
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.sim.plan import Fault
from tests.sim.regions import REGIONS

if TYPE_CHECKING:
    from tests.sim.plan import Plan


class _Kind(NamedTuple):
    """The text format of one kind of fault."""

    #: Description of its targets, and the pattern of all targets, separated by spaces.
    targets: str
    pattern: str
    #: It has a duration.
    lasts: bool = False
    #: Description of its amount; "": no amount.
    amount: str = ""


_SERVER: Final = r"shard-\d+-\d+"
_COORDINATOR: Final = r"coordinator-\d+"
_NODE: Final = rf"(?:{_SERVER}|mms-\d+|fh-\d+|{_COORDINATOR})"
_MEMBER: Final = rf"{_SERVER}|mms-\d+|fh-\d+"
_CLIENT: Final = r"(?:writer|reader|owner)-\d+"
_ANY_PROCESS: Final = rf"(?:{_NODE}|{_CLIENT}|host)"
_LINKS: Final = rf"{_ANY_PROCESS} {_ANY_PROCESS}(?: {_ANY_PROCESS} {_ANY_PROCESS})*"

_ONE_SERVER: Final = _Kind("one storage server (as shard-0-1)", _SERVER)
_ONE_SERVER_LASTS: Final = _ONE_SERVER._replace(lasts=True)
_ONE_PROCESS: Final = _Kind(
    "one storage server (as shard-0-1) or coordinator", rf"(?:{_SERVER}|{_COORDINATOR})"
)
_PROCESS_OR_CLIENT: Final = _Kind(
    "one storage server (as shard-0-1), coordinator or client (as writer-0)",
    rf"(?:{_SERVER}|{_COORDINATOR}|{_CLIENT})",
    lasts=True,
)
_ONE_DISK: Final = _ONE_SERVER_LASTS._replace(amount="which call fails (as *3: the third)")
_SOME_LINKS: Final = _Kind("links: from, to, from, to (as shard-0-1 fh-0)", _LINKS, lasts=True)
_NO_TARGET_LASTS: Final = _Kind("no target", "", lasts=True)
_ONE_SHARD: Final = _Kind("one shard (as shard-2)", r"shard-\d+")
_ONE_REGION: Final = _Kind(f"one region: {', '.join(REGIONS)}", "|".join(REGIONS), lasts=True)
_ONE_NODE: Final = _Kind("one server or node (as shard-0-1, fh-0)", _NODE, lasts=True)

KINDS: Final = {
    "kill": _ONE_PROCESS,
    "stop": _ONE_SERVER,
    "power": _ONE_SERVER,
    "pause": _PROCESS_OR_CLIENT,
    "suspend": _PROCESS_OR_CLIENT,
    "offline": _Kind("one client (as writer-0)", _CLIENT, lasts=True),
    "cut": _SOME_LINKS,
    "clog": _SOME_LINKS,
    "isolate": _ONE_NODE,
    "skew": _ONE_NODE._replace(amount="by how much the clock is fast (as *-200: 20 % slow)"),
    "slow-disk": _ONE_SERVER_LASTS,
    "full-disk": _ONE_SERVER_LASTS,
    "fail-disk": _ONE_DISK,
    "no-descriptors": _Kind(
        "servers or nodes (as shard-0-0 shard-0-1)",
        rf"(?:{_MEMBER})(?: (?:{_MEMBER}))*",
        lasts=True,
    ),
    "crash": _ONE_DISK,
    "rot": _ONE_SERVER,
    "kill-mms": _Kind("one node of the membership service (as mms-0)", r"mms-\d+"),
    "kill-fh": _Kind("one node of the failure handler (as fh-0)", r"fh-\d+"),
    "rot-mms": _Kind("one node of the membership service (as mms-0)", r"mms-\d+"),
    "rot-fh": _Kind("one node of the failure handler (as fh-0)", r"fh-\d+"),
    "lead-mms": _NO_TARGET_LASTS,
    "lead-fh": _NO_TARGET_LASTS,
    "age": _Kind("no target", "", amount="how many runs of leases were granted (as *3000)"),
    "rebuild": _Kind("no target", "", amount="what else is lost, 1 to 15 (as *3), or 16: nothing"),
    "set-level": _ONE_SERVER._replace(amount="to which level: 1 (as *1): disk, 2: memory"),
    "kill-client": _Kind("one client (as writer-0)", _CLIENT),
    "power-all": _Kind("no target", ""),
    "cut-region": _ONE_REGION,
    "lose-region": _ONE_REGION,
    "destroy-region": _ONE_REGION._replace(lasts=False),
    "power-region": _ONE_REGION._replace(lasts=False),
    "slow-region": _ONE_REGION,
    "part-regions": _Kind(
        f"two regions of {', '.join(REGIONS)}",
        "|".join(f"{one} {other}" for one, other in permutations(REGIONS, 2)),
        lasts=True,
    ),
    "strand-region": _ONE_REGION._replace(
        amount="what else happens: 1 the others are given up, 2 lost disks, 4 kills, 8 nothing"
    ),
    "relabel": _ONE_SERVER._replace(amount="its region: 1 (as *1): eu, 2: us, 3: ap"),
    "add-shard": _ONE_SHARD,
    "remove-shard": _ONE_SHARD,
    "finalize-shard": _ONE_SHARD,
}
#: The slowest clock that still runs forwards, in parts per thousand.
_LEAST_SKEW: Final = -999


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Parse faults, separated by semicolons.

    Raises:
        ValueError: a part is no fault.

    """
    return tuple(parse_fault(part) for part in text.split(";") if part.strip())


def parse_fault(text: str) -> Fault:
    """Parse a fault.

    Raises:
        ValueError: the text is no fault.

    """
    when, name, *words = text.split() if len(text.split()) > 1 else (text, "")
    if not when.isdecimal():
        raise ValueError(f'"{text.strip()}" does not begin with a time in ms')
    if name not in KINDS:
        known = ", ".join(sorted(KINDS))
        raise ValueError(f'"{text.strip()}": there is no fault "{name}", only {known}')
    durations = [word for word in words if re.fullmatch(r"\d+ms", word)]
    amounts = [word for word in words if re.fullmatch(r"\*-?\d+", word)]
    targets = [word for word in words if word not in durations + amounts]
    wants = _unmet(name, targets, durations, amounts)
    if wants:
        raise ValueError(f'"{text.strip()}": {name} {wants}')
    duration_ms = int(durations[0][:-2]) if durations else 0
    amount = int(amounts[0][1:]) if amounts else 0
    return Fault(int(when), name, tuple(targets), duration_ms, amount)


def _unmet(name: str, targets: list[str], durations: list[str], amounts: list[str]) -> str:
    """Return the violated part of a kind's format; "" if the words match."""
    kind = KINDS[name]
    if not re.fullmatch(kind.pattern, " ".join(targets)):
        return f"names {kind.targets}"
    if len(durations) != kind.lasts or "0ms" in durations:
        return "has one duration (as 300ms)" if kind.lasts else "has no duration"
    least = _LEAST_SKEW if name == "skew" else 1
    is_good = all(int(word[1:]) >= least and word != "*0" for word in amounts)
    if len(amounts) != bool(kind.amount) or not is_good:
        return f"says {kind.amount}" if kind.amount else "has no amount"
    return ""


def unknown_targets(fault: Fault, plan: Plan) -> list[str]:
    """Return the servers and nodes of a fault that a plan's cluster does not have.

    Clients are not checked: an unknown client is like one that has ended. Neither are shards of
    changes: the membership service refuses unknown ones.
    """
    return [name for name in fault.targets if re.fullmatch(_NODE, name) and name not in plan.nodes]
