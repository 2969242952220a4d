"""Requests that wait, against a plain list of them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from logdb import wire
from logdb.coordinator.pending_requests import PATIENCE_NS, Waiting, Waitings

ROUTES = (b"r1", b"r2")
KEYS = (b"a", b"b", b"c")
LIMIT = 6

routes = st.sampled_from(ROUTES)
keys = st.sampled_from(KEYS)
steps = st.one_of(
    st.tuples(st.just("ask"), routes, st.integers(1, 4), st.integers(1, 3)),
    st.tuples(st.just("watch"), routes, st.integers(1, 4), keys),
    st.tuples(st.just("get"), routes, st.integers(1, 4), st.none()),
    st.tuples(st.just("end"), st.integers(0, 9), st.none(), st.none()),
    st.tuples(st.just("decided"), st.integers(1, 3), st.none(), st.none()),
    st.tuples(st.just("changed"), st.lists(keys, max_size=3), st.none(), st.none()),
    st.tuples(st.just("time"), st.integers(0, PATIENCE_NS), st.none(), st.none()),
)


def question(kind: str, request: int, what: Any) -> Any:
    if kind == "ask":
        return wire.Ask(1, request, b"session1", what)
    if kind == "watch":
        return wire.Watch(1, request, what, 0, 0)
    return wire.Get(1, request, [], 0, True, [], [])


class Plain:
    """All that wait, in the order in which they came last."""

    def __init__(self) -> None:
        self.waitings = Waitings(LIMIT)
        self.all: list[Waiting] = []
        self.now = 0
        self.resumed: list[Waiting] = []

    def add(self, kind: str, route: bytes, request: int, what: Any) -> None:
        asked = question(kind, request, what)
        known = [w for w in self.all if (w.route, w.question.request) == (route, request)]
        assert self.waitings.repeated(route, asked, self.now) == bool(known)
        assert self.waitings.is_full == (len(self.all) >= LIMIT)
        if known:
            self.all.remove(known[0])
            self.all.append(known[0])
            assert known[0].asked_at == self.now
        elif not self.waitings.is_full:
            waiting = self.waitings.add(route, asked, self.now, self.resumed.append)
            self.all.append(waiting)
            if kind == "ask":
                self.waitings.for_decision(waiting)
            elif kind == "watch":
                self.waitings.for_change(waiting)

    def end(self, waiting: Waiting) -> None:
        self.waitings.end(waiting)
        self.waitings.end(waiting)
        self.all.remove(waiting)
        waiting.resume()
        assert waiting not in self.resumed

    def decided(self, number: int) -> None:
        asks = {w for w in self.all if isinstance(w.question, wire.Ask)}
        assert set(self.waitings.undecided()) == asks
        found = set(self.waitings.decided(b"session1", number))
        assert found == {w for w in asks if w.question.number == number}
        for waiting in found:
            self.end(waiting)

    def changed(self, changed: list[bytes]) -> None:
        self.waitings.touch(changed)
        found = self.waitings.changed()
        watches = [w for w in self.all if isinstance(w.question, wire.Watch)]
        assert len(found) == len(set(found))
        assert set(found) == {w for w in watches if w.question.key in changed}
        assert self.waitings.changed() == []

    def pass_time(self, duration: int) -> None:
        self.now += duration
        late = self.waitings.late(self.now)
        assert late == [w for w in self.all if self.now - w.asked_at >= PATIENCE_NS]
        for waiting in late:
            self.end(waiting)


@given(st.lists(steps))
def test_everybody_is_found_by_what_they_wait_for(taken: list[tuple[Any, ...]]) -> None:
    plain = Plain()
    for kind, first, second, third in taken:
        if kind == "end":
            if first < len(plain.all):
                plain.end(plain.all[first])
        elif kind == "decided":
            plain.decided(first)
        elif kind == "changed":
            plain.changed(first)
        elif kind == "time":
            plain.pass_time(first)
        else:
            plain.add(kind, first, second, third)
        plain.waitings.check()
        assert len(plain.waitings) == len(plain.all)
    for waiting in plain.all:
        waiting.resume()
    assert plain.resumed == plain.all


def test_all_watched_keys_may_have_changed() -> None:
    waitings = Waitings()
    made = [
        waitings.add(b"r", question("watch", number, key), 0, lambda _: None)
        for number, key in enumerate(KEYS)
    ]
    for waiting in made:
        waitings.for_change(waiting)
    waitings.touch_all()
    assert set(waitings.changed()) == set(made)


def test_a_repeated_request_has_patience_again_and_others_do_not() -> None:
    waitings = Waitings()
    first, second = (
        waitings.add(b"r", question("get", number, None), 0, lambda _: None) for number in (1, 2)
    )
    assert waitings.repeated(b"r", first.question, PATIENCE_NS - 1)
    assert waitings.late(PATIENCE_NS) == [second]
