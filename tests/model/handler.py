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
        for index, server in enumerate(servers):
            if server.is_alive:
                yield from self._choose(state, server, control, index)
            if control.decision is not None and server.view < control.view:
                yield from self._enter(state, servers, control, index)
        if control.is_under_way:
            if control.answer is not None:
                yield self._decide(state, control)
        else:
            yield from self._conclude(state, servers, control)
        yield from self._forget(state, control)

    def _choose(
        self, state: State, server: Server, control: Control, index: int
    ) -> Iterator[tuple[Step, State]]:
        """Select a candidate, or let the candidate promise."""
        with_control = self._frame.with_control
        if (
            control.attempt < self._frame.bounds.views
            and index != control.candidate
            and (server.view >= control.confirmed or not self._on["no-way-back"])
        ):
            attempt = control.attempt + 1
            begun = control._replace(attempt=attempt, candidate=index, answer=None)
            yield ("Begin", attempt, index), tuple(with_control(state, begun))
        if control.is_under_way and index == control.candidate and control.answer is None:
            number, slots = self._local.freeze(state[index], control.attempt, control.grant)
            new = with_control(state, control._replace(answer=slots))
            yield ("Acquire", index), self._promised(new, index, number)
        # A second handler, which does not know the first, decides the same view.
        if not self._on["one-decision"] and not control.is_under_way and server.view < control.view:
            number, slots = self._local.freeze(state[index], control.view, control.grant)
            new = with_control(state, control._replace(decision=(slots, index)))
            yield ("DecideAgain", control.view, index), self._promised(new, index, number)

    def _promised(self, new: list[int], index: int, number: int) -> State:
        new[index] = number
        if self._on["freeze"]:
            self._frame.disconnect(new, index)
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
        self, state: State, servers: list[Server], control: Control, index: int
    ) -> Iterator[tuple[Step, State]]:
        """Let a server enter the view, if it may.

        The survivor enters as the process that promised; the others copy its state. No server
        violates a promise to a later recovery.
        """
        assert control.decision is not None
        slots, survivor = control.decision
        frame, view = self._frame, control.view
        promised, is_separate = servers[index].frozen, self._on["separate-recoveries"]
        if index == survivor:
            is_ready = promised == view or not self._on["freeze"] or not is_separate
        else:
            is_ready = servers[survivor].view == view
        if not is_ready or not servers[survivor].is_alive or (promised > view and is_separate):
            return
        is_confirmed = control.confirmed == view or not self._on["confirm"]
        stable = frame.settled(control.grant) if is_confirmed else servers[index].stable
        is_last = all(server.view == view for other, server in enumerate(servers) if other != index)
        new = frame.with_control(state, control._replace(decision=None)) if is_last else [*state]
        new[index] = self._local.entered(slots, view, stable, control.grant)
        if self._on["views"]:
            frame.disconnect(new, index)
        new[frame.delivered] = self._local.deliver(state[frame.delivered], new[index], stable)
        yield ("Enter", view, index), tuple(new)

    def _conclude(
        self, state: State, servers: list[Server], control: Control
    ) -> Iterator[tuple[Step, State]]:
        """Confirm the view, return the shard to service, and grant it epoch 2."""
        frame, view = self._frame, control.view
        joined = sum(server.view == view for server in servers)
        least = 1 if frame.bounds.alone else frame.n - 1
        if control.confirmed < view and joined >= least:
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
