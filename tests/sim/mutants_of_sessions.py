"""Mutants of sessions: a server's knowledge of its clients. See tests/sim/mutation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from shard.state.sessions import Session, Sessions
from tests.sim.mutation import kill_the_primary, mutant, replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sim.plan import Plan
    from ziplog.core.entries import SessionTable

_replace: Final = msgspec.structs.replace


def _kill_with_small_parts(seed: int) -> Plan:
    """The primary is killed, and receives the sessions unit by unit afterwards."""
    return kill_the_primary(seed)._replace(part_bytes=1, lanes=16, bulk=60)


@mutant(_kill_with_small_parts, "the primary is killed under load; sessions are cut into units")
def rest_of_a_session_is_not_asked_for() -> Iterator[None]:
    """A joining server takes a part of a session for the whole session (section 11)."""
    table = Session.table

    def cut(self: Session, after: int, limit_bytes: int) -> SessionTable:
        return _replace(table(self, after, limit_bytes), is_cut=False)

    def part(self: Sessions, after: tuple[bytes, int], limit_bytes: int, *rest: Any) -> Any:
        tables, _ = whole(self, after, limit_bytes, *rest)
        is_last = not tables or tables[-1].client == max(self.by_client)
        return tables, not is_last

    whole = Sessions.part
    with replaced(Session, "table", cut), replaced(Sessions, "part", part):
        yield
