"""Steps of the failure handler in the shard model.

Begin, Acquire, Decide, Enter by each server, Confirm, Finish; then leases again (Grant). `Control`
holds the committed state; `Control.answer` is the leader's memory, which a change of the leader
drops. The names are those of docs/spec/Shard.tla.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.model.parts import Control

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.model.local import Local
    from tests.model.parts import Frame, Server, State, Step


class Handler:
    """The failure handler's steps."""

    def __init__(self, frame: Frame, local: Local) -> None:
        self._frame = frame
        self._local = local
        self._on = frame.on

    def steps(
        self, state: State, servers: list[Server], control: Control
    ) -> Iterator[tuple[Step, State]]:
        """Yield all (step, next state)."""
        for who, server in enumerate(servers):
            if server.is_alive:
                yield from self._choose(state, server, control, who)
            if control.decision is not None and server.view < control.view:
                yield from self._enter(state, servers, control, who)
        if control.is_under_way:
            if control.answer is not None:
                yield self._decide(state, control)
        else:
            yield from self._conclude(state, servers, control)
        yield from self._forget(state, control)

    def _choose(
        self, state: State, server: Server, control: Control, who: int
    ) -> Iterator[tuple[Step, State]]:
        """Select a candidate, or let the candidate promise."""
        with_control = self._frame.with_control
        if (
            control.attempt < self._frame.bounds.views
            and who != control.candidate
            and (server.view >= control.confirmed or not self._on["no-way-back"])
        ):
            attempt = control.attempt + 1
            begun = control._replace(attempt=attempt, candidate=who, answer=None)
            yield ("Begin", attempt, who), tuple(with_control(state, begun))
        if control.is_under_way and who == control.candidate and control.answer is None:
            number, slots = self._local.freeze(state[who], control.attempt, control.grant)
            new = with_control(state, control._replace(answer=slots))
            yield ("Acquire", who), self._promised(new, who, number)
        # A second handler, which does not know the first, decides the same view.
        if not self._on["one-decision"] and not control.is_under_way and server.view < control.view:
            number, slots = self._local.freeze(state[who], control.view, control.grant)
            new = with_control(state, control._replace(decision=(slots, who)))
            yield ("DecideAgain", control.view, who), self._promised(new, who, number)

    def _promised(self, new: list[int], who: int, number: int) -> State:
        new[who] = number
        if self._on["freeze"]:
            self._frame.disconnect(new, who)
        return tuple(new)

    def _decide(self, state: State, control: Control) -> tuple[Step, State]:
        """Commit the start of the next view."""
        attempt, candidate = control.attempt, control.candidate
        assert control.answer is not None
        assert candidate is not None, "an answer without a server"
        is_only_copy = self._frame.n <= 2
        decided = control._replace(
            view=attempt,
            candidate=None,
            confirmed=attempt if is_only_copy else control.confirmed,
            decision=(control.answer, candidate),
            answer=None,
            base=0 if self._on["durable-decision"] else control.view,
        )
        step = ("Decide", attempt, candidate)
        return step, tuple(self._frame.with_control(state, decided))

    def _enter(
        self, state: State, servers: list[Server], control: Control, who: int
    ) -> Iterator[tuple[Step, State]]:
        """Let a server enter the view, if it may.

        The survivor enters as the process that promised; the others copy its state. No server
        violates a promise to a later recovery.
        """
        assert control.decision is not None
        slots, survivor = control.decision
        frame, view = self._frame, control.view
        promised, is_separate = servers[who].frozen, self._on["separate-recoveries"]
        if who == survivor:
            is_ready = promised == view or not self._on["freeze"] or not is_separate
        else:
            is_ready = servers[survivor].view == view
        if not is_ready or not servers[survivor].is_alive or (promised > view and is_separate):
            return
        is_confirmed = control.confirmed == view or not self._on["confirm"]
        stable = frame.settled(control.grant) if is_confirmed else servers[who].stable
        is_last = all(server.view == view for other, server in enumerate(servers) if other != who)
        new = frame.with_control(state, control._replace(decision=None)) if is_last else [*state]
        new[who] = self._local.entered(slots, view, stable, control.grant)
        if self._on["views"]:
            frame.disconnect(new, who)
        new[frame.delivered] = self._local.deliver(state[frame.delivered], new[who], stable)
        yield ("Enter", view, who), tuple(new)

    def _conclude(
        self, state: State, servers: list[Server], control: Control
    ) -> Iterator[tuple[Step, State]]:
        """Confirm the view, return the shard to service, and grant it epoch 2."""
        frame, view = self._frame, control.view
        joined = sum(server.view == view for server in servers)
        if control.confirmed < view and joined >= frame.n - 1:
            confirmed = control._replace(confirmed=view)
            yield ("Confirm", view), tuple(frame.with_control(state, confirmed))
        if control.finished < view and joined == frame.n:
            finished = control._replace(finished=view, confirmed=view)
            yield ("Finish", view), tuple(frame.with_control(state, finished))
        has_epoch_2 = frame.bounds.epoch < frame.bounds.positions
        if control.finished == view and not control.grant and has_epoch_2:
            granted = control._replace(grant=view)
            yield ("Grant", view), tuple(frame.with_control(state, granted))

    def _forget(self, state: State, control: Control) -> Iterator[tuple[Step, State]]:
        """Change the leader: the new one knows only the committed state."""
        if control.answer is not None:
            forgot = control._replace(answer=None)
            yield ("HandlerCrash",), tuple(self._frame.with_control(state, forgot))
        if 0 < control.base < control.view:  # the decision was not committed
            base = control.base
            forgot = Control(base, base, None, base, base, None, control.grant, control.crashes)
            yield ("HandlerCrash",), tuple(self._frame.with_control(state, forgot))
