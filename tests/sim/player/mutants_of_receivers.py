"""Mutants of the rules of receivers (docs/player.md, section 10).

Two rules have no mutant, because no correct player needs them: it opens the target itself after an
outcome that it does not know, and it sends no batch from elsewhere.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from logplayer.push.messages import PushBatch, PushQuery, PushWorking
from logplayer.push.receiver_node import ReceiverNode, _fields
from tests.sim.mutation import LOSSY
from tests.sim.player.mutants import mutant, plan_of, replaced
from tests.sim.player.mutants_of_push import PUSHED, killed_receivers
from tests.sim.player.plan import LEASE_MS, PlayerFault, PlayerPlan, TargetPlan
from tests.simulator.kernel import MS, US
from tests.simulator.network import Conditions
from ziplog.core.node import Send

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logplayer.push.messages import PushMessage


def repeated_frames(seed: int) -> PlayerPlan:
    """Return a run of a sink behind a receiver; the network repeats and delays frames."""
    targets = (TargetPlan("sink", 2, 3, is_pushed=True),)
    slow = Conditions(delay_ns=(50 * US, 10 * MS), repeats=0.2, stalls=0.05)
    return plan_of(seed, targets=targets, records=100, conditions=slow)


def lost_frames(seed: int) -> PlayerPlan:
    """Return a run of a sink behind a receiver; the network loses frames."""
    targets = (TargetPlan("sink", 2, 3, is_pushed=True),)
    return plan_of(seed, targets=targets, records=100, conditions=LOSSY)


def suspended_receivers(seed: int) -> PlayerPlan:
    """Return a run in which a receiver stands still in a step, until the player has given up."""
    random = Random(f"suspended receivers {seed}")
    faults = [
        PlayerFault(50, "target-slow", 0, 1_500),
        PlayerFault(random.randrange(200, 1_000), "pause-receiver", 0, 20 * LEASE_MS),
    ]
    return plan_of(seed, *faults, targets=PUSHED, records=100)


@mutant(lost_frames)
def replies_are_not_remembered() -> Iterator[None]:
    """The last request is answered from memory."""
    on_request = ReceiverNode._on_request

    def requested(self: ReceiverNode, src: bytes, message: Any) -> None:
        session = self._sessions.get((message.cluster, message.cursor))
        if isinstance(message, PushQuery) and session is not None and not session.step:
            session.position = None
            self._refuse(src, message, "lost", "it is forgotten")
        else:
            on_request(self, src, message)

    with replaced(ReceiverNode, "_on_request", requested):
        yield


def _carried_out_again(*, is_old: bool) -> Iterator[None]:
    """Carry out copies of batches, of the last number or of lower ones."""
    on_request = ReceiverNode._on_request

    def requested(self: ReceiverNode, src: bytes, message: Any) -> None:
        session = self._sessions.get((message.cluster, message.cursor))
        if isinstance(message, PushBatch) and session is not None and not session.step:
            is_copy = message.number < session.number if is_old else message.number > 0
            if is_copy and message.number <= session.number and session.task is not None:
                session.number, session.position = message.number - 1, message.start
        on_request(self, src, message)

    with replaced(ReceiverNode, "_on_request", requested):
        yield


@mutant(repeated_frames)
def copies_are_carried_out() -> Iterator[None]:
    """A repetition of the last number is not carried out again."""
    yield from _carried_out_again(is_old=False)


@mutant(repeated_frames)
def lower_numbers_are_carried_out() -> Iterator[None]:
    """A lower number is ignored."""
    yield from _carried_out_again(is_old=True)


@mutant(killed_receivers)
def unknown_batches_are_awaited() -> Iterator[None]:
    """A receiver says so if it does not know a batch."""
    refuse = ReceiverNode._refuse

    def refused(
        self: ReceiverNode, src: bytes, message: PushMessage, kind: Any, text: str, **more: Any
    ) -> None:
        if kind == "lost" and isinstance(message, PushQuery):
            self._effects.append(Send(src, PushWorking(*_fields(message))))
        else:
            refuse(self, src, message, kind, text, **more)

    with replaced(ReceiverNode, "_refuse", refused):
        yield


@mutant(suspended_receivers)
def opens_wait_for_no_step() -> Iterator[None]:
    """One step of a task is under way at a time: an open waits for the end of the last one."""
    on_new = ReceiverNode._on_new

    def begun(self: ReceiverNode, session: Any, message: Any) -> None:
        session.step = 0 if not isinstance(message, PushBatch) else session.step
        on_new(self, session, message)

    with replaced(ReceiverNode, "_on_new", begun):
        yield
