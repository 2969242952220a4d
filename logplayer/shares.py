"""Which tasks a process takes and gives up, computed from one list of the cursors.

Every process has a quota: the tasks divided by the processes, and one more for as many as are left
over, first for those that own more, then by name. Below its quota a process claims tasks that no
living process owns; above it the process gives up the surplus. So no task moves between processes
that are at their quotas, and none is taken from a living owner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


class Share(NamedTuple):
    """What a process changes."""

    #: Tasks to claim, in the order of the attempts, and how many of them.
    claim: list[str]
    missing: int
    #: Tasks to give up.
    drain: list[str]


def quotas(owned: Mapping[str, int], tasks: int) -> dict[str, int]:
    """Return the quota of each process.

    Args:
        owned: number of tasks that each process owns, by its name; not empty.
        tasks: number of all tasks.

    """
    each, more = divmod(tasks, len(owned))
    order = sorted(owned, key=lambda name: (-owned[name], name))
    return {name: each + (index < more) for index, name in enumerate(order)}


def share(
    own: str, slot: int, members: Collection[str], owners: Mapping[str, str], held: Sequence[str]
) -> Share:
    """Return what a process changes.

    Args:
        own: the name of the process; one of `members`.
        slot: the number of its member cursor, from 0: where it begins to claim.
        members: the names of all processes.
        owners: the owner of each task in a fixed order; "": none.
        held: the tasks that the process claims or owns now, and does not give up.

    """
    owned = dict.fromkeys(members, 0)
    for owner in owners.values():
        if owner in owned:
            owned[owner] += 1
    owned[own] = len(held)
    quota = quotas(owned, len(owners))[own]
    first = slot * len(owners) // len(members) % max(len(owners), 1)
    order = [*list(owners)[first:], *list(owners)[:first]]
    if len(held) > quota:
        surplus = len(held) - quota
        return Share([], 0, [name for name in reversed(order) if name in held][:surplus])
    free = [name for name in order if name not in held and (owners[name] not in owned)]
    return Share(free, quota - len(held), [])
