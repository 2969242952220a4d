"""A session has the route of its last message; the least recently seen session goes first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from logdb.coordinator.sessions import Sessions

names = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])
routes = st.sampled_from([b"1", b"2"])


@given(st.lists(st.tuples(names, routes)), st.integers(1, 4))
def test_the_most_recent_sessions_are_known(heard: list[tuple[bytes, bytes]], limit: int) -> None:
    sessions = Sessions(limit)
    for session, route in heard:
        sessions.set_route(session, route)
    last: dict[bytes, bytes] = {}
    for session, route in reversed(heard):
        last.setdefault(session, route)
    known = dict(list(last.items())[:limit])
    assert len(sessions) == len(known)
    for session in (b"a", b"b", b"c", b"d", b"e"):
        assert sessions.route(session) == known.get(session)
