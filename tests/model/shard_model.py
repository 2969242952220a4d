"""One shard, its failure handler and its readers, as states and steps: docs/spec/Shard.tla.

The steps, rules and invariants are those of the specification, under the same names; the README
beside it says what they stand for. Invariant: a part of a state that can play no role any more (a
dead server's memory, a letter to nobody) has one fixed value, so that it tells no states apart.
"""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Final

from tests.model.handler import Handler
from tests.model.invariants import INVARIANTS
from tests.model.local import Local
from tests.model.parts import NONE, NOOP, PRIMARY, Frame
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
        """Make a model.

        Args:
            bounds: how large it is.
            off: names of the rules that do not hold.
            invariants: names of those to check.
            symmetry: take states that differ in the records' names only for one.

        """
        self.frame: Final = Frame(bounds, frozenset(off))
        self._on: Final = self.frame.on
        self._local: Final = Local(self.frame)
        self._handler: Final = Handler(self.frame, self._local)
        self._checks: Final = [(name, INVARIANTS[name]) for name in invariants]
        _, *others = permutations(range(bounds.records))
        self._renamings: Final = [Renaming(self.frame, names) for names in others if symmetry]

    def initial(self) -> State:
        """Return the state before anything happened."""
        return self.frame.initial()

    def canonical(self, state: State) -> State:
        """Return the least of the states that differ in the records' names only."""
        if not self._renamings:
            return state
        return min(state, *[renaming.of(state) for renaming in self._renamings])

    def violated(self, state: State) -> str | None:
        """Return the first invariant that does not hold."""
        frame = self.frame
        for name, holds in self._checks:
            if not holds(frame, state):
                return name
        return None

    def successors(self, state: State) -> list[tuple[Step, State]]:
        """Return all (step, next state)."""
        control, servers = self.frame.control_of(state), self.frame.servers_of(state)
        # A server that joined a view works in it when it has begun for all.
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
        ]

    # --- replication ---

    def _replicate(
        self, state: State, servers: list[Server], working: list[bool], grant: int
    ) -> Iterator[tuple[Step, State]]:
        """Let records, time-outs and forwards come."""
        frame, local = self.frame, self._local
        for who, works in enumerate(working):
            if not works:
                continue
            for step, server, ack, message in local.arrivals(who, state[who], grant):
                new = list(state)
                new[who] = server
                new[frame.acks] |= ack
                if message is not None:
                    for backup in range(1, frame.n):
                        if self._is_reachable(servers[backup], message.view):
                            at = frame.n + backup - 1
                            new[at] = local.appended(state[at], message)
                yield step, tuple(new)
            if who != PRIMARY:
                at = frame.n + who - 1
                for step, server, queue, ack in local.forwards(who, state[who], state[at], grant):
                    new = list(state)
                    new[who], new[at] = server, queue
                    new[frame.acks] |= ack
                    yield step, tuple(new)

    def _is_reachable(self, server: Server, view: int) -> bool:
        """Whether it can ever take a forward that is sent now, in `view`."""
        is_of_view = server.view == view or not self._on["views"]
        return server.is_alive and not server.frozen and is_of_view

    def _stabilise(
        self, state: State, servers: list[Server], working: list[bool]
    ) -> Iterator[tuple[Step, State]]:
        """Let the primary hear what all hold, and the backups hear of it, or know by themselves."""
        primary = servers[PRIMARY]
        if all(working) and len({server.view for server in servers}) == 1:
            stable = min(self._local.held(server) for server in servers)
            if stable > primary.stable:
                yield ("Report", stable), self._raise(state, PRIMARY, stable)
        for who in range(1, self.frame.n):
            server = servers[who]
            if (
                working[who]
                and primary.is_alive
                and server.view == primary.view
                and primary.stable > server.stable
            ):
                step = ("Learn", who, primary.stable)
                yield step, self._raise(state, who, primary.stable)
            # What the only backup took from the primary is on both.
            if working[who] and (self.frame.n == 2 or not self._on["two-copies"]):
                held = self._local.held(server)
                if held > server.stable:
                    yield ("Hold", who, held), self._raise(state, who, held)

    def _raise(self, state: State, who: int, stable: int) -> State:
        """Raise what a server knows to be stable, and have it told."""
        new, told = list(state), self.frame.told
        new[who] = self._local.with_stable(state[who], stable)
        new[told] = self._local.tell(state[told], state[who], stable)
        return tuple(new)

    # --- failures ---

    def _fail(
        self, state: State, servers: list[Server], control: Control
    ) -> Iterator[tuple[Step, State]]:
        """Crash a server; without the rule, let it go on."""
        frame = self.frame
        if control.crashes < frame.bounds.crashes and sum(s.is_alive for s in servers) > 1:
            crashed = control._replace(crashes=control.crashes + 1)
            for who, server in enumerate(servers):
                if server.is_alive:
                    new = frame.with_control(state, crashed)
                    new[who] = self._local.crashed(state[who])
                    frame.disconnect(new, who)
                    yield ("Crash", who), tuple(new)
        if not self._on["restart-is-failure"]:
            for who, server in enumerate(servers):
                if not server.is_alive and server.view == control.view:
                    new = list(state)
                    new[who] = frame.servers.number(server._replace(is_alive=True))
                    yield ("Restart", who), tuple(new)

    # --- readers ---

    def _read(
        self, state: State, servers: list[Server], control: Control
    ) -> Iterator[tuple[Step, State]]:
        """Tell what a confirmed view began with; without the rules, what nobody should tell."""
        frame = self.frame
        told = frame.told_of(state)
        if frame.n > 2 and control.confirmed == control.view > 1:
            limit = frame.begins_with(control)
            for who, server in enumerate(servers):
                if server.is_alive and server.view == control.view and server.stable < limit:
                    yield ("Settle", who, limit), self._raise(state, who, limit)
        if not self._on["stable-reads"]:
            for who, server in enumerate(servers):
                rest = server.slots[len(told) :]
                if server.is_alive and rest and rest[0] != NONE:
                    yield ("Subscribe", who), self._and_told(state, rest[0])
        may_declare = not self._on["noop-after-freeze"] and control.is_under_way
        if may_declare and len(told) < frame.settled(control.grant):
            yield ("DeclareNoop", len(told) + 1), self._and_told(state, NOOP)
        if frame.bounds.merge:
            yield from self._merge(state, len(told))

    def _and_told(self, state: State, value: int) -> State:
        """Tell subscribers one more position."""
        new = list(state)
        new[self.frame.told] = self.frame.tolds.number((*self.frame.told_of(state), value))
        return tuple(new)

    def _merge(self, state: State, told: int) -> Iterator[tuple[Step, State]]:
        """Move the other shard's frontier, or hand out our next position."""
        given, other = divmod(state[self.frame.merge], 2)
        if not other:
            yield ("OtherMoves",), (*state[:-1], state[-1] + 1)
        if given < told and (given + 1 < 2 or other or not self._on["least-frontier"]):
            yield ("HandOut", given + 1), (*state[:-1], state[-1] + 2)
