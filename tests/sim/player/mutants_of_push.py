"""Mutants of push, of a process that stops, and of a target that goes back."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from logplayer.contract import Opened, Retry
from logplayer.push.messages import PushFailed, PushQuery
from logplayer.push.sender import PushSender
from logplayer.task import PlayerTask
from tests.sim.player.mutants import mutant, plan_of, replaced
from tests.sim.player.plan import LEASE_MS, PlayerFault, PlayerPlan, TargetPlan

if TYPE_CHECKING:
    from collections.abc import Iterator

PUSHED = (TargetPlan("store", 1, 3, is_pushed=True),)


def killed_receivers(seed: int) -> PlayerPlan:
    """Return a run in which a receiver is killed while steps take long."""
    random = Random(f"killed receivers {seed}")
    kills = [PlayerFault(random.randrange(100, 2_900), "kill-receiver", 0, 50) for _ in range(6)]
    slow = PlayerFault(50, "target-slow", 0, 3_000)
    return plan_of(seed, slow, *kills, targets=PUSHED, span_ms=3_000)


def paused_receivers(seed: int) -> PlayerPlan:
    """Return a run in which a receiver is silent for longer than a player waits."""
    random = Random(f"paused receivers {seed}")
    at_ms = random.randrange(200, 800)
    faults = [
        PlayerFault(50, "target-slow", 0, 1_000),
        PlayerFault(at_ms, "pause-receiver", 0, 20 * LEASE_MS),
        PlayerFault(at_ms + 100, "kill-receiver", 0, 19 * LEASE_MS),
    ]
    return plan_of(seed, *faults, targets=PUSHED)


def stops(seed: int) -> PlayerPlan:
    """Return a run in which processes stop, and others continue, without a fault."""
    random = Random(f"stops {seed}")
    faults = [PlayerFault(random.randrange(200, 900), "stop-player", n) for n in range(2)]
    targets = (TargetPlan("sink", 3, 3), TargetPlan("sink", 2, 3))
    return plan_of(seed, *faults, players=3, targets=targets, records=150)


def put_back(seed: int) -> PlayerPlan:
    """Return a run in which an older state of a target is put back."""
    random = Random(f"older {seed}")
    older = [PlayerFault(random.randrange(300, 900), "target-older") for _ in range(2)]
    kills = [PlayerFault(one.at_ms + 10, "kill-player") for one in older]
    return plan_of(seed, *older, *kills)


@mutant(killed_receivers)
def lost_is_done() -> Iterator[None]:
    """A batch that the receiver does not know is not taken for done."""
    on_failed = PushSender._on_failed

    def passed(self: PushSender, message: PushFailed, worker: Any) -> None:
        if message.kind == "lost" and isinstance(worker.request, PushQuery):
            self._end(message.number, b"")
        else:
            on_failed(self, message, worker)

    with replaced(PushSender, "_on_failed", passed):
        yield


@mutant(paused_receivers)
def silence_of_a_receiver_is_success() -> Iterator[None]:
    """After 10 seconds without a message the outcome is unknown."""
    fail_open = PushSender._fail_open

    def passed(self: PushSender, request: int, error: Exception) -> None:
        worker = self._workers[self._waiting[request]]
        is_silent = isinstance(error, Retry) and self._now >= worker.silent_at
        if is_silent and isinstance(worker.request, PushQuery):
            self._end(request, b"")
        else:
            fail_open(self, request, error)

    with replaced(PushSender, "_fail_open", passed):
        yield


@mutant(stops)
def drains_do_not_wait() -> Iterator[None]:
    """A process that stops ends the step under way before it releases the task."""
    drain = PlayerTask.drain

    def drained(self: PlayerTask) -> None:
        self._step = ""
        drain(self)

    with replaced(PlayerTask, "drain", drained), replaced(PlayerTask, "check", lambda *_: None):
        yield


@mutant(put_back)
def older_targets_are_passed() -> Iterator[None]:
    """The position of a target counts, also if it is before the cursor."""
    on_opened = PlayerTask._on_opened

    def passed(self: PlayerTask, opened: Opened) -> None:
        position = opened.position
        if position is not None:
            opened = Opened(max(position, self.claim.committed), opened.mark)
        on_opened(self, opened)

    with replaced(PlayerTask, "_on_opened", passed):
        yield
