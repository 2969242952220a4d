"""Readers of a replica: single reads, subscriptions to stable records, and the tail.

A subscription delivers the stable records from its start on. Each message continues the last one,
stays within the credit, and carries the leases that the reader needs. It covers this shard only;
the reader merges the shards (docs/protocol.md, sections 6 and 7).

Invariant: the positions delivered to a subscription are contiguous, and below the frontier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from shard.serving.early_streams import EarlyStreams
from shard.serving.subscription import (
    BATCH_WORK,
    MAX_CREDIT_BYTES,
    MAX_DELIVER_BYTES,
    MAX_SUBSCRIPTIONS,
    SILENCE_NS,
    Key,
    Part,
    Subscription,
    stable_part,
    units_of,
)
from shard.serving.tail_forwarding import TailForwarding
from ziplog.core.entries import Place, Skip, decode_body
from ziplog.segments.entry import BusyError, UnreadableError
from ziplog.wire import (
    Answer,
    Credit,
    Deliver,
    Insert,
    Locate,
    Located,
    Outline,
    Outlined,
    Read,
    ReadReply,
    RelayedInsert,
    Subscribe,
    Tail,
    TailReply,
    Unsubscribe,
)

if TYPE_CHECKING:
    from shard.state.guesses import Guesses
    from shard.state.replica_state import ReplicaState
    from shard.state.sessions import HeldUnit
    from ziplog.core.entries import Unit
    from ziplog.core.message import Message
    from ziplog.segments.entry import Entry

#: Requests of readers, and a peer's reply to a forwarded one.
REQUESTS: Final = (Read, Subscribe, Credit, Unsubscribe, Tail, TailReply, Outline, Locate)


class Lookup(msgspec.Struct, frozen=True, gc=False):
    """The result of a lookup: the state of one position."""

    answer: Answer
    stable: bool
    epoch: int = 0
    #: The body of the record's unit, and the gsns of its records.
    body: bytes = b""
    gsns: list[int] = []


class Readers:
    """The part of a replica that serves readers."""

    def __init__(self, state: ReplicaState, guesses: Guesses | None) -> None:
        self._state: Final = state
        self._guesses = guesses
        #: As of `set_left_out`.
        self.is_left_out = False
        self.subscriptions: Final[dict[Key, Subscription]] = {}
        #: The streams of readers that speculate.
        self.early: Final = EarlyStreams(state, self._note_subscriptions)
        self._forwarding: Final = TailForwarding(state)
        #: Those with records, and the bare streams of each client.
        self._with_records: Final[dict[Key, Subscription]] = {}
        self._bare: Final[dict[bytes, dict[int, Subscription]]] = {}
        #: Subscriptions that are behind the frontier.
        self._lagging: Final[dict[Key, Subscription]] = {}
        state.counters.lagging = self._lagging
        #: The frontier of the subscriptions that are not behind; some began above it.
        self._frontier = 0
        #: The last stable entry at this frontier, and whether missing leases held the frontier
        #: back.
        self._stable = state.stream.stable
        self._is_held_back = True

    def begin_view(self, guesses: Guesses | None) -> None:
        """Continue in the next view, with its guesses."""
        self._guesses = guesses
        self.early.close_all()

    def on_request(self, route: bytes, message: Message, now: int) -> None:
        """Handle one of `REQUESTS`."""
        is_in_view = self._state.server_state in {"up", "joined"}
        match message:
            case Read():
                self.read(route, message)
            case Subscribe():
                self.subscribe(route, message, now)
            case Credit():
                self.renew(route, message, now)
            case Unsubscribe():
                self.unsubscribe(message)
            case Tail() if is_in_view and self._is_confirmed:
                self.tail(route, message)
                self._forwarding.on_tail(route, message)
            case TailReply():
                self._forwarding.on_reply(route, message)
            case Outline():
                self.outline(route, message)
            case Locate() if is_in_view:
                self.locate(route, message, now)

    @property
    def _is_confirmed(self) -> bool:
        """Whether all entries of older views are stable, so each completed insert is here.

        Before, a recovery may go back, and inserts may complete in a view without this server.
        """
        return self._state.stream.stable >= self._state.view_base

    # --- single positions ---

    def read(self, route: bytes, read: Read) -> None:
        """Reply with the record, or the state, of a position."""
        state = self._state
        found = self._find(read.gsn)
        state.counters.reads[found.answer] += 1
        timestamp_us, key, payload = 0, None, b""
        if found.answer == "record":
            contents = decode_body(found.body, len(found.gsns))
            index = found.gsns.index(read.gsn)
            timestamp_us, key = contents.timestamp_us, contents.key_of(index)
            payload = contents.payloads[index]
        state.send(
            route,
            ReadReply(
                state.cluster, state.shard, state.view, state.server, read.request, read.gsn,
                found.answer, found.stable, state.trim, found.epoch, timestamp_us, key, payload,
            ),
        )  # fmt: skip

    def _find(self, gsn: int) -> Lookup:
        state, stream = self._state, self._state.stream
        if gsn < state.trim:
            return Lookup("trimmed", stable=True)
        try:
            entry = state.store.find(gsn)
        except BusyError:
            return Lookup("unknown", stable=True)
        except UnreadableError as error:
            state.damaged = (gsn, error)
            return Lookup("unknown", stable=True)
        stable = entry is not None and entry.fseq <= stream.stable
        if state.server_state != "up" and not stable:
            # An acked record may be or have been here, so "not-yet" could be wrong.
            return Lookup("unknown", stable=False)
        decision = entry.decision if entry is not None else None
        if type(decision) is Place:
            assert decision.body is not None, "the store keeps bodies"
            return Lookup("record", stable, decision.epoch, decision.body, decision.gsns)
        if state.clock.owns(gsn) is False:
            return Lookup("wrong-shard", stable=True)
        if type(decision) is Skip and stable:
            return Lookup("no-op", stable=True)
        if decision is None and gsn < stream.stable_end:
            # The store has all own positions below the stable end, and not this one.
            return Lookup("wrong-shard", stable=True)
        return self._find_guess(gsn)

    def _find_guess(self, gsn: int) -> Lookup:
        for unit in self._guesses.promised.values() if self._guesses is not None else ():
            assert unit.gsns is not None, "a promise has slots"
            if gsn in unit.gsns:
                epoch = unit.epoch if unit.epoch >= 0 else self._state.clock.epoch_at(gsn)
                return Lookup("record", False, epoch, unit.body, unit.gsns)
        return Lookup("not-yet", stable=False)

    def tail(self, route: bytes, tail: Tail) -> None:
        """Reply with the tail of the shard."""
        state = self._state
        stable_end = state.stream.stable_end
        try:
            last = state.store.last_record_below(min(tail.below, stable_end)) if tail.below else 0
        except BusyError as error:
            state.refuse(route, tail.request, "not-ready", str(error))
            return
        state.send(
            route,
            TailReply(
                state.cluster, state.shard, state.view, state.server, tail.request,
                state.stream.last_record, state.frontier, last, state.stream.end,
            ),
        )  # fmt: skip

    def outline(self, route: bytes, outline: Outline) -> None:
        """Reply with the size of a range, and the port that serves its blocks."""
        state = self._state
        state.store.seal(outline.stop)
        start = max(outline.start, state.trim)
        steps = state.store.outline(start, outline.stop) if start < outline.stop else []
        state.send(
            route,
            Outlined(
                state.cluster, state.shard, state.view, state.server, outline.request,
                state.trim, steps, state.archive_port, state.store.segments_below(outline.stop),
            ),
        )  # fmt: skip

    def locate(self, route: bytes, locate: Locate, now: int) -> None:
        """Reply with the outcome of a unit that the client sent in some view (D13)."""
        state = self._state
        session = state.sessions.by_client.get(locate.client)
        if session is not None:
            session.last_seen = now
        unit = session.units.get(locate.seq) if session is not None else None
        verdict: Literal["present", "absent", "pending"] = "pending"
        gsns: list[int] = []
        if unit is not None:
            if unit.confirmed and unit.slots[-1] < state.stream.stable_end:
                verdict, gsns = "present", unit.slots
            elif state.server and not unit.confirmed and locate.view == state.view:
                self._relay(unit, locate.since)
        elif (
            locate.view < state.view
            and self._is_confirmed
            and (session is None or locate.seq >= session.first_incomplete)
            and not state.sessions.may_have_forgotten(locate.client, locate.since)
        ):
            verdict = "absent"
        state.send(
            route,
            Located(
                state.cluster, state.shard, state.view, state.server, locate.client, locate.seq,
                verdict, gsns,
            ),
        )  # fmt: skip

    def _relay(self, unit: HeldUnit, since: int) -> None:
        """Pass this backup's guess on to the primary: the client may not reach that."""
        state = self._state
        session = state.sessions.by_client[unit.client]
        insert = Insert(
            state.cluster, state.shard, state.view, unit.client, unit.seq,
            session.first_incomplete, unit.predecessor, unit.after, unit.count, unit.body,
            since=since, sealed=unit.sealed,
        )  # fmt: skip
        state.send(state.peers[0], RelayedInsert(state.cluster, insert))

    # --- streams ---

    def subscribe(self, route: bytes, message: Subscribe, now: int) -> None:
        """Open a subscription; a repetition of the message renews it."""
        state = self._state
        key = (message.client, message.subscription)
        if message.kind == "early":
            if key in self.early.streams or not self._refuse_if_full(route, message):
                self.early.subscribe(route, message, now)
            return
        self.on_stable([])
        subscription = self.subscriptions.get(key)
        if subscription is not None:
            subscription.last_seen = now
        elif self._has_nothing_soon and message.start >= state.frontier:
            state.refuse(
                route, message.subscription, "not-ready", f"the server is {state.server_state}"
            )
            return
        elif self._refuse_if_full(route, message):
            return
        else:
            is_bare = message.kind == "frontier"
            credit = message.credit if is_bare else min(message.credit, MAX_CREDIT_BYTES)
            subscription = self.subscriptions[key] = Subscription(
                route, message.subscription, message.start, credit, now, is_bare=is_bare
            )
            if is_bare:
                self._bare.setdefault(message.client, {})[message.subscription] = subscription
                state.awaited.setdefault(message.client, 0)
                state.awaiting.add(message.client)
                state.raise_awaited(message.client, message.credit)
            else:
                self._with_records[key] = self._lagging[key] = subscription
            self._note_subscriptions()
        self._answer(key, subscription)

    @property
    def _has_nothing_soon(self) -> bool:
        """Whether readers that have everything from this server had better ask another one."""
        return self._state.server_state in {"starting", "limbo"} or self.is_left_out

    def set_left_out(self, *, is_left_out: bool) -> None:
        """Record whether the shard continues without this server, as far as the server knows.

        When that begins, readers that have everything from this server change to another one.
        """
        has_begun = is_left_out and not self.is_left_out
        self.is_left_out = is_left_out
        if has_begun:
            for key, subscription in list(self.subscriptions.items()):
                if key not in self._lagging:
                    self._send_elsewhere(key, subscription)

    def _send_elsewhere(self, key: Key, subscription: Subscription) -> None:
        """Drop a subscription; its reader then tries another server."""
        detail = f"the server is {self._state.server_state}, and its shard continues without it"
        self._state.refuse(subscription.route, subscription.id, "not-ready", detail)
        self._drop(key)

    def _refuse_if_full(self, route: bytes, message: Subscribe) -> bool:
        """Refuse a reader if there may be no more subscriptions; return whether it was refused."""
        if len(self.subscriptions) + len(self.early.streams) < MAX_SUBSCRIPTIONS:
            return False
        detail = f"{MAX_SUBSCRIPTIONS} subscriptions are open"
        self._state.refuse(route, message.subscription, "full", detail)
        return True

    def renew(self, route: bytes, message: Credit, now: int) -> None:
        """Renew a subscription, and add credit."""
        key = (message.client, message.subscription)
        if key in self.early.streams:
            self.early.renew(route, message, now)
            return
        self.on_stable([])
        subscription = self.subscriptions.get(key)
        if subscription is None:
            self._state.refuse(
                route, message.subscription, "unknown-subscription", "subscribe again"
            )
            return
        subscription.route = route
        if self._has_nothing_soon and key not in self._lagging:
            self._send_elsewhere(key, subscription)
            return
        subscription.last_seen = now
        if subscription.is_bare:
            is_raised = message.credit > subscription.credit
            subscription.credit = max(subscription.credit, message.credit)
            self._state.raise_awaited(message.client, message.credit)
            if is_raised and subscription.sent >= self._state.frontier:
                return  # `on_stable` sends the next frontier
        else:
            subscription.add_credit(message.credit, MAX_CREDIT_BYTES)
        self._answer(key, subscription)

    def unsubscribe(self, message: Unsubscribe) -> None:
        """Close a subscription."""
        key = (message.client, message.subscription)
        if key in self.early.streams:
            self.early.drop(key)
        else:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        dropped = self.subscriptions.pop(key, None)
        if dropped is not None and dropped.is_bare:
            self._drop_bare(*key)
        self._with_records.pop(key, None)
        self._lagging.pop(key, None)
        self._note_subscriptions()

    def _drop_bare(self, client: bytes, number: int) -> None:
        """Drop a bare stream; forget what its client waits for, unless it has another one."""
        streams, state = self._bare[client], self._state
        del streams[number]
        if not streams:
            del self._bare[client], state.awaited[client]
            state.awaiting.discard(client)

    def _note_subscriptions(self) -> None:
        state, early = self._state, self.early.streams
        state.has_early_streams = bool(early)
        state.has_subscribers = bool(self.subscriptions or early)
        state.has_followers = bool(self._with_records or early)
        state.counters.subscriptions = len(self.subscriptions) + len(early)

    def _answer(self, key: Key, subscription: Subscription) -> None:
        if key in self._lagging:
            subscription.is_asked = True  # The end of the batch answers.
        elif subscription.is_bare:
            self._send_frontier(key, subscription)
            if key[0] in self._state.awaiting:
                self._send_awaited(key[0], self._state.frontier)
        else:
            self._deliver(subscription, subscription.sent, [], self._state.frontier)

    def _send_frontier(self, key: Key, subscription: Subscription) -> None:
        """Send the frontier to the reader of a bare stream."""
        frontier = self._state.frontier
        if not self._drop_if_trimmed(key, subscription):
            self._deliver(subscription, max(frontier, subscription.sent), [], frontier)

    def on_stable(self, news: list[Entry]) -> None:
        """Deliver newly stable records, or the new frontier, to up-to-date subscriptions.

        `news` are all entries that became stable since the last call.
        """
        stable = self._state.stream.stable
        assert self._stable + len(news) == stable, "stable entries were not passed to the readers"
        self._stable = stable
        frontier = self._state.frontier
        was_held_back = self._is_held_back
        self._is_held_back = self._state.stream.stable_end > frontier
        if frontier == self._frontier:
            return
        is_all_news = not (was_held_back or self._is_held_back)
        units, size = units_of(news) if self._with_records else ([], 0)
        records = sum(len(unit.gsns) for unit in units)
        for client in list(self._state.awaiting):
            self._send_awaited(client, frontier)
        for key, subscription in self._with_records.items():
            if key in self._lagging:
                continue
            fits = subscription.used + size <= subscription.credit and size <= MAX_DELIVER_BYTES
            if is_all_news and fits and subscription.sent == self._frontier:
                subscription.used += size
                self._count(records, size)
                self._deliver(subscription, frontier, units, frontier)
            else:
                self._lagging[key] = subscription
        self._frontier = frontier

    def _send_awaited(self, client: bytes, frontier: int) -> None:
        """Send the frontier to a client that waits for a position which may be below it."""
        state, awaited = self._state, self._state.awaited[client]
        for number, stream in list(self._bare[client].items()):
            if stream.sent <= awaited and stream.sent < frontier:
                self._send_frontier((client, number), stream)
        if frontier > awaited:
            state.awaiting.discard(client)

    def send_early(self) -> None:
        """Send what the primary decided in a batch."""
        self.early.on_batch_end()

    def send_early_without_store(self) -> bool:
        """Do the same, unless that needs the store; return whether all was sent."""
        if self.early.needs_store:
            return False
        self.early.on_batch_end()
        return not self.early.has_work

    def catch_up(self) -> None:
        """Send the next parts to subscriptions that are behind and have credit, in turns.

        The work of one batch is limited, for all subscriptions together.
        """
        self.on_stable([])
        left = BATCH_WORK
        for key, subscription in list(self._lagging.items()):
            if left > 0 or subscription.is_asked:
                left -= self._catch_up(key, subscription, left)

    @property
    def has_work(self) -> bool:
        """Whether `catch_up`, or the end of a batch, has records to send."""
        if self._state.has_early_streams and self.early.has_work:
            return True
        return bool(self._lagging) and any(
            one.is_asked or one.used < one.credit for one in self._lagging.values()
        )

    def _catch_up(self, key: Key, subscription: Subscription, max_entries: int) -> int:
        """Send the next part, of at most `max_entries`, or the answer; return the work."""
        state, frontier = self._state, self._state.frontier
        if self._drop_if_trimmed(key, subscription):
            return 0
        part = Part([], subscription.sent, 0, 0)
        has_credit = subscription.used < subscription.credit
        if max_entries > 0 and has_credit and subscription.sent < frontier:
            limit = min(MAX_DELIVER_BYTES, subscription.credit - subscription.used)
            try:
                part = stable_part(state, subscription.sent, limit, max_entries)
            except UnreadableError as error:
                if not isinstance(error, BusyError):
                    state.damaged = (subscription.sent, error)
                state.refuse(subscription.route, subscription.id, "not-ready", str(error))
                self._drop(key)
                return 0
            subscription.used += part.size
            self._count(sum(len(unit.gsns) for unit in part.units), part.size)
            self._lagging[key] = self._lagging.pop(key)  # Others are first in the next batch.
        if part.stop >= frontier:
            del self._lagging[key]
        if subscription.is_asked or part.stop > subscription.sent:
            subscription.is_asked = False
            self._deliver(subscription, max(part.stop, subscription.sent), part.units, frontier)
        return part.work

    def _drop_if_trimmed(self, key: Key, subscription: Subscription) -> bool:
        """Drop a subscription whose position was trimmed; return whether it was."""
        if not subscription.notify_if_trimmed(self._state):
            return False
        self._drop(key)
        return True

    def _count(self, records: int, size: int) -> None:
        counters = self._state.counters
        counters.delivered_records += records
        counters.delivered_bytes += size

    def _deliver(
        self, subscription: Subscription, stop: int, units: list[Unit], frontier: int
    ) -> None:
        """Send the units below `stop`; `frontier`: of the shard."""
        state = self._state
        start, leases = subscription.advance(state, stop)
        state.send(
            subscription.route,
            Deliver(
                state.cluster, state.shard, state.view, state.server, subscription.id,
                start, stop, units, leases, frontier,
            ),
        )  # fmt: skip

    def on_trim(self) -> None:
        """Notify the subscriptions that are below the new trim point."""
        self.early.on_trim()
        for key, subscription in list(self.subscriptions.items()):
            self._drop_if_trimmed(key, subscription)

    def close_all(self) -> None:
        """Close all subscriptions: this server has left its view, or joins another one."""
        self.early.close_all()
        for key, subscription in list(self.subscriptions.items()):
            self._state.refuse(
                subscription.route, subscription.id, "not-ready", "the server begins another view"
            )
            self._drop(key)

    def drop_idle(self, now: int) -> None:
        """Drop the subscriptions that sent no message for too long."""
        self.early.drop_idle(now)
        for key, subscription in list(self.subscriptions.items()):
            if now - subscription.last_seen >= SILENCE_NS:
                self._drop(key)

    def check(self) -> None:
        """Assert the invariant, and those of the early streams."""
        self.early.check()
        self._forwarding.check()
        for key, subscription in self.subscriptions.items():
            is_current = subscription.is_bare or subscription.sent >= self._frontier
            assert key in self._lagging or is_current
        assert self._lagging.keys() <= self.subscriptions.keys()
        state = self._state
        bare = {(client, n): s for client, those in self._bare.items() for n, s in those.items()}
        assert self.subscriptions == self._with_records | bare
        assert state.awaited.keys() == self._bare.keys() >= state.awaiting
        for (client, _), stream in bare.items():
            awaited = state.awaited[client]
            is_sent = stream.sent > awaited or stream.sent >= state.frontier
            assert client in state.awaiting or is_sent, "an append would not get its frontier"
