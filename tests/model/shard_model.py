"""One shard, its failure handler and its readers, as states and steps: docs/spec/Shard.tla.

The steps, rules and invariants have the specification's names; its README explains them.
Invariant: an irrelevant part of a state (a dead server's memory, an undeliverable forward) has one
fixed value, so that it does not distinguish states.
"""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Final

from tests.model.handler import Handler
from tests.model.invariants import INVARIANTS
from tests.model.local import Local
from tests.model.parts import NONE, NOOP, PRIMARY, Frame, bits
from tests.model.renaming import Renaming

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.model.parts import Bounds, Control, Server, State, Step


class ShardModel:
    """The model, with some rules switched off."""

    def __init__(
        self,
        bounds: Bounds,
        off: Iterable[str] = (),
        invariants: Iterable[str] = tuple(INVARIANTS),
        *,
        symmetry: bool = True,
    ) -> None:
        """Create a model.

        Args:
            bounds: its size.
            off: names of the rules to switch off.
            invariants: names of the invariants to check.
            symmetry: merge states that differ only in the records' names.

        """
        self.frame: Final = Frame(bounds, frozenset(off))
        self._on: Final = self.frame.on
        self._local: Final = Local(self.frame)
        self._handler: Final = Handler(self.frame, self._local)
        self._checks: Final = [(name, INVARIANTS[name]) for name in invariants]
        # The record that is inserted after an append differs from the others.
        free = bounds.records - bool(bounds.append)
        _, *others = ((*names, *range(free, bounds.records)) for names in permutations(range(free)))
        self._renamings: Final = [Renaming(self.frame, names) for names in others if symmetry]

    def initial(self) -> State:
        """Return the initial state."""
        return self.frame.initial()

    def canonical(self, state: State) -> State:
        """Return the least of the states that differ only in the records' names."""
        if not self._renamings:
            return state
        return min(state, *[renaming.of(state) for renaming in self._renamings])

    def violated(self, state: State) -> str | None:
        """Return the first violated invariant."""
        frame = self.frame
        for name, holds in self._checks:
            if not holds(frame, state):
                return name
        return None

    def successors(self, state: State) -> list[tuple[Step, State]]:
        """Return all (step, next state)."""
        control, servers = self.frame.control_of(state), self.frame.servers_of(state)
        # A joined server works in its view once the view has started for all.
        may_begin = not self._on["separate-recoveries"]
        working = [
            server.is_alive and not server.frozen and (server.view == control.finished or may_begin)
            for server in servers
        ]
        return [
            *self._replicate(state, servers, working, control.grant),
            *self._stabilise(state, servers, working),
            *self._fail(state, servers, control),
            *self._handler.steps(state, servers, control),
            *self._read(state, servers, control),
            *self._answer(state, servers, control),
        ]

    # --- replication ---

    def _replicate(
        self, state: State, servers: list[Server], working: list[bool], grant: int
    ) -> Iterator[tuple[Step, State]]:
        """Deliver records, timeouts and forwards."""
        frame, local = self.frame, self._local
        is_answered = not frame.bounds.append or state[frame.answered] == 1
        for index, works in enumerate(working):
            if not works:
                continue
            for step, server, ack, message in local.arrivals(
                index, state[index], grant, is_answered
            ):
                new = list(state)
                new[index] = server
                new[frame.acks] |= ack
                if message is not None:
                    for backup in range(1, frame.n):
                        if self._is_reachable(servers[backup], message.view):
                            at = frame.n + backup - 1
                            new[at] = local.appended(state[at], message)
                yield step, tuple(new)
            if index != PRIMARY:
                at = frame.n + index - 1
                for step, server, queue, ack in local.forwards(
                    index, state[index], state[at], grant
                ):
                    new = list(state)
                    new[index], new[at] = server, queue
                    new[frame.acks] |= ack
                    yield step, tuple(new)

    def _is_reachable(self, server: Server, view: int) -> bool:
        """Whether a server can ever apply a forward that is sent now, in `view`."""
        is_of_view = server.view == view or not self._on["views"]
        return server.is_alive and not server.frozen and is_of_view

    def _stabilise(
        self, state: State, servers: list[Server], working: list[bool]
    ) -> Iterator[tuple[Step, State]]:
        """Raise stable positions: the primary by reports, the backups by messages or themselves."""
        primary = servers[PRIMARY]
        if all(working) and len({server.view for server in servers}) == 1:
            stable = min(self._local.held(server) for server in servers)
            if stable > primary.stable:
                yield ("Report", stable), self._raise(state, PRIMARY, stable)
        for index in range(1, self.frame.n):
            server = servers[index]
            if (
                working[index]
                and primary.is_alive
                and server.view == primary.view
                and primary.stable > server.stable
            ):
                step = ("Learn", index, primary.stable)
                yield step, self._raise(state, index, primary.stable)
            # Entries that the only backup applied are on both servers.
            if working[index] and (self.frame.n == 2 or not self._on["two-copies"]):
                held = self._local.held(server)
                if held > server.stable:
                    yield ("Hold", index, held), self._raise(state, index, held)

    def _raise(self, state: State, index: int, stable: int) -> State:
        """Raise a server's stable position, and deliver the records below."""
        new, delivered = list(state), self.frame.delivered
        new[index] = self._local.with_stable(state[index], stable)
        new[delivered] = self._local.deliver(state[delivered], state[index], stable)
        return tuple(new)

    # --- failures ---

    def _fail(
        self, state: State, servers: list[Server], control: Control
    ) -> Iterator[tuple[Step, State]]:
        """Crash a server; without the rule, it continues."""
        frame = self.frame
        if control.crashes < frame.bounds.crashes and sum(s.is_alive for s in servers) > 1:
            crashed = control._replace(crashes=control.crashes + 1)
            for index, server in enumerate(servers):
                if server.is_alive:
                    new = frame.with_control(state, crashed)
                    new[index] = self._local.crashed(state[index])
                    frame.disconnect(new, index)
                    yield ("Crash", index), tuple(new)
        if not self._on["restart-is-failure"]:
            for index, server in enumerate(servers):
                if not server.is_alive and server.view == control.view:
                    new = list(state)
                    new[index] = frame.servers.number(server._replace(is_alive=True))
                    yield ("Restart", index), tuple(new)

    # --- readers ---

    def _read(
        self, state: State, servers: list[Server], control: Control
    ) -> Iterator[tuple[Step, State]]:
        """Deliver the start state of a confirmed view; without the rules, also other records."""
        frame = self.frame
        delivered = frame.delivered_in(state)
        if frame.n > 2 and control.confirmed == control.view > 1:
            limit = frame.begins_with(control)
            for index, server in enumerate(servers):
                if server.is_alive and server.view == control.view and server.stable < limit:
                    yield ("Settle", index, limit), self._raise(state, index, limit)
        if not self._on["stable-reads"]:
            for index, server in enumerate(servers):
                rest = server.slots[len(delivered) :]
                if server.is_alive and rest and rest[0] != NONE:
                    yield ("Subscribe", index), self._and_delivered(state, rest[0])
        may_declare = not self._on["noop-after-freeze"] and control.is_under_way
        if may_declare and len(delivered) < frame.settled(control.grant):
            yield ("DeclareNoop", len(delivered) + 1), self._and_delivered(state, NOOP)
        if frame.bounds.merge:
            yield from self._merge(state, len(delivered))

    def _and_delivered(self, state: State, value: int) -> State:
        """Deliver one more position to subscribers."""
        new = list(state)
        new[self.frame.delivered] = self.frame.deliveries.number(
            (*self.frame.delivered_in(state), value)
        )
        return tuple(new)

    def _merge(self, state: State, delivered: int) -> Iterator[tuple[Step, State]]:
        """Move the other shard's frontier, or deliver our next position."""
        given, other = divmod(state[self.frame.merge], 2)
        if not other:
            yield ("OtherMoves",), self._raised(state, self.frame.merge, 1)
        if given < delivered and (given + 1 < 2 or other or not self._on["least-frontier"]):
            yield ("HandOut", given + 1), self._raised(state, self.frame.merge, 2)

    def _raised(self, state: State, index: int, by: int) -> State:
        return (*state[:index], state[index] + by, *state[index + 1 :])

    # --- appends ---

    def _answer(
        self, state: State, servers: list[Server], control: Control
    ) -> Iterator[tuple[Step, State]]:
        """Return an append of another shard: a server reported our positions before it as stable.

        Without a rule, something less is enough.
        """
        frame, on = self.frame, self._on
        last = frame.bounds.append
        if not last or state[frame.answered]:
            return
        primary, backups = servers[PRIMARY], servers[1:]
        is_enough = (
            len(frame.delivered_in(state)) >= last
            or (not on["told-decided"] and primary.is_alive and self._has_decided(primary, last))
            or (not on["told-members"] and control.is_under_way)
            or (not on["told-frozen"] and any(server.frozen for server in servers))
            or (
                not on["told-guess"]
                and any(backup.is_alive and NONE not in backup.slots[:last] for backup in backups)
            )
        )
        if is_enough:
            yield ("Answer", last), self._raised(state, frame.answered, 1)

    def _has_decided(self, server: Server, last: int) -> bool:
        return server.decided & bits(1, last) == bits(1, last)
