"""Pending requests, compared with a plain list of them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from logdb import wire
from logdb.coordinator.pending_requests import EXPIRY_NS, PendingRequest, PendingRequests, bytes_of
from logdb.records import KeyRead, RangeRead

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
    st.tuples(st.just("time"), st.integers(0, EXPIRY_NS), st.none(), st.none()),
)


def message(kind: str, request: int, what: Any) -> Any:
    if kind == "ask":
        return wire.AwaitDecision(1, request, b"session1", what)
    if kind == "watch":
        return wire.Watch(1, request, what, 0, 0)
    return wire.Get(1, request, [], 0, True, [], [])


class Plain:
    """All that wait, in the order in which they came last."""

    def __init__(self) -> None:
        self.pending = PendingRequests(LIMIT)
        self.all: list[PendingRequest] = []
        self.now = 0
        self.resumed: list[PendingRequest] = []

    def add(self, kind: str, route: bytes, request: int, what: Any) -> None:
        sent = message(kind, request, what)
        known = [w for w in self.all if (w.route, w.message.request) == (route, request)]
        assert self.pending.refresh(route, sent, self.now) == bool(known)
        is_full = bool(self.pending.refusal(bytes_of(sent)))
        assert is_full == (len(self.all) >= LIMIT)
        if known:
            self.all.remove(known[0])
            self.all.append(known[0])
            assert known[0].last_received_at == self.now
        elif not is_full:
            added = self.pending.add(PendingRequest(route, sent, self.now, self.resumed.append))
            self.all.append(added)
            if kind == "ask":
                self.pending.wait_for_decision(added)
            elif kind == "watch":
                self.pending.wait_for_change(added)

    def remove(self, request: PendingRequest) -> None:
        self.pending.remove(request)
        self.pending.remove(request)
        self.all.remove(request)
        request.resume()
        assert request not in self.resumed

    def decision_waiters(self, number: int) -> None:
        asks = {w for w in self.all if isinstance(w.message, wire.AwaitDecision)}
        assert set(self.pending.all_decision_waiters()) == asks
        found = set(self.pending.decision_waiters(b"session1", number))
        assert found == {w for w in asks if w.message.number == number}
        for request in found:
            self.remove(request)

    def pop_changed(self, changed: list[bytes]) -> None:
        self.pending.mark_changed(changed)
        found = self.pending.pop_changed()
        watches = [w for w in self.all if isinstance(w.message, wire.Watch)]
        assert len(found) == len(set(found))
        assert set(found) == {w for w in watches if w.message.key in changed}
        assert self.pending.pop_changed() == []

    def pass_time(self, duration: int) -> None:
        self.now += duration
        late = self.pending.expired(self.now)
        assert late == [w for w in self.all if self.now - w.last_received_at >= EXPIRY_NS]
        for request in late:
            self.remove(request)


@given(st.lists(steps))
def test_requests_are_found_by_what_they_wait_for(taken: list[tuple[Any, ...]]) -> None:
    plain = Plain()
    for kind, first, second, third in taken:
        if kind == "end":
            if first < len(plain.all):
                plain.remove(plain.all[first])
        elif kind == "decided":
            plain.decision_waiters(first)
        elif kind == "changed":
            plain.pop_changed(first)
        elif kind == "time":
            plain.pass_time(first)
        else:
            plain.add(kind, first, second, third)
        plain.pending.check()
        assert len(plain.pending) == len(plain.all)
    for request in plain.all:
        request.resume()
    assert plain.resumed == plain.all


def test_all_watched_keys_may_have_changed() -> None:
    pending = PendingRequests()
    made = [
        pending.add(PendingRequest(b"r", message("watch", number, key), 0, lambda _: None))
        for number, key in enumerate(KEYS)
    ]
    for request in made:
        pending.wait_for_change(request)
    pending.mark_all_changed()
    assert set(pending.pop_changed()) == set(made)


def test_the_bytes_of_waiting_requests_are_bounded() -> None:
    """A request may name 10,000 keys, and as many reads, of a kilobyte each."""
    pending = PendingRequests(limit_bytes=3_000_000)
    keys, reads = [bytes(1000)] * 1000, [KeyRead(bytes(1000), 1)] * 1000
    get = wire.Get(1, 1, keys, 0, True, [], [])
    scan = wire.Scan(1, 2, b"", bytes(1000), 9, 0, True, reads, [])
    validate = wire.Validate(1, 3, [], [RangeRead(bytes(1000), None, bytes(16))] * 1000)
    waiting = [pending.add(PendingRequest(b"r", each, 0, lambda _: None)) for each in (get, scan)]
    pending.check()
    assert "2 requests are already waiting, of 2,30" in pending.refusal(bytes_of(validate))
    assert "the limit of 3,000,000 bytes" in pending.refusal(bytes_of(validate))
    assert pending.refusal(bytes_of(wire.AwaitDecision(1, 4, b"session1", 1))) == ""
    assert pending.refusal(bytes_of(wire.TakeSnapshot(1, 5, b"session1"))) == ""
    assert pending.refusal(bytes_of(message("watch", 6, b"a"))) == ""
    pending.remove(waiting[0])
    assert pending.refusal(bytes_of(validate)) == ""
    pending.remove(waiting[1])
    assert pending.bytes == 0


def test_a_repetition_restarts_the_expiry_of_its_request_only() -> None:
    pending = PendingRequests()
    first, second = (
        pending.add(PendingRequest(b"r", message("get", number, None), 0, lambda _: None))
        for number in (1, 2)
    )
    assert pending.refresh(b"r", first.message, EXPIRY_NS - 1)
    assert pending.expired(EXPIRY_NS) == [second]
