"""Correct log with random clients that write a history: the oracle for the checker.

Every operation takes effect at one moment between its call and its result, for all clients at once.
Unknown outcomes, killed clients, trims and losses happen too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.history import events
from tests.history.payloads import PER_CLIENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SHARDS = 3


@dataclass
class Log:
    """The state of the log, common to all clients."""

    held: dict[int, tuple[int, int]] = field(default_factory=dict)  # gsn -> shard, payload
    sealed: int = 1  # below it nothing changes any more
    trim: int = 0
    durable: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    losses: list[tuple[int, int, int]] = field(default_factory=list)
    shards: list[int] = field(default_factory=lambda: list(range(SHARDS)))  # that take records

    def tail(self) -> int:
        return max(self.held, default=0)

    def seal(self, stop: int) -> None:
        self.sealed = max(self.sealed, stop)


class World:
    """Random clients of one log; `lines` has a list of events for each process."""

    def __init__(
        self, seed: int, steps: int = 400, *, faults: bool = True, trims: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.log = Log()
        self.now = 1_000
        self.faults, self.trims = faults, trims
        self.lines: dict[str, list[events.Event]] = {"workload": []}
        self._ops: dict[str, int] = {}
        self._running: dict[str, Iterator[None] | None] = {}
        for number in (1, 2, 3):
            self._begin(f"client-{number}", self._client(f"client-{number}", number))
        for number in (0, 1):
            self._begin(f"subscriber-{number}", self._subscriber(f"subscriber-{number}"))
        for _ in range(steps):
            self._step()
        self._drain()
        if self.log.losses:
            self.lines["workload"].append(events.Losses(self.tick(), self.log.losses))
        self._finish()

    def _begin(self, name: str, script: Iterator[None]) -> None:
        self.lines[name] = []
        self._ops[name] = 0
        self._running[name] = script

    def tick(self) -> int:
        self.now += self.random.randint(1, 3)
        return self.now

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def _step(self) -> None:
        name = self.random.choice([name for name, script in self._running.items() if script])
        script = self._running[name]
        assert script is not None
        if self.faults and name.startswith("client") and self.chance(0.002):
            self._running[name] = None  # killed
            number = len(self._running) + 1
            self._begin(f"client-{number}", self._client(f"client-{number}", number))
            return
        if self.faults and self.chance(0.002):
            self._lose()
        if self.faults and len(self.log.shards) > 1 and self.chance(0.002):
            self._leave()
        next(script)

    def _drain(self) -> None:
        """Stop all clients at once; their pending operations have no result."""
        self._running = dict.fromkeys(self._running)

    def _finish(self) -> None:
        name = "final"
        self._begin(name, iter(()))
        for _ in self._scan(name, max(self.log.trim, 1)):
            pass

    def _lose(self) -> None:
        """All servers of a shard die at once."""
        shard, tail = self.random.randrange(SHARDS), self.log.tail()
        start = max(1, tail - self.random.randint(0, 20))
        self.log.seal(tail + 1)
        self.log.losses.append((shard, start, tail + 1))
        for gsn in range(start, tail + 1):
            if self.log.held.get(gsn, (-1, 0))[0] == shard and gsn not in self.log.durable:
                del self.log.held[gsn]
                self.log.lost.add(gsn)

    def _leave(self) -> None:
        """Remove a shard: it accepts no more records, and one client learns of it."""
        shard = self.random.choice(self.log.shards)
        self.log.shards.remove(shard)
        self.say("workload", events.Left(self.tick(), shard))

    # --- client operations: other clients may act at each `yield` ---

    def op(self, name: str) -> int:
        self._ops[name] += 1
        return self._ops[name]

    def say(self, name: str, event: events.Event) -> None:
        self.lines[name].append(event)

    def _client(self, name: str, number: int) -> Iterator[None]:
        own: list[int] = []
        payloads = iter(range(number * PER_CLIENT + 1, (number + 1) * PER_CLIENT))
        kinds: list[Callable[[], Iterator[None]]] = [
            *[lambda: self._insert(name, payloads, own)] * 6,
            lambda: self._read(name),
            lambda: self._scan(name, self.random.randint(0, max(self.log.tail(), 0))),
            lambda: self._tail(name),
            lambda: self._seal(name, own),
            lambda: self._sync(name, own),
        ]
        if self.trims:
            kinds.append(lambda: self._trim(name))
        while True:
            yield from self.random.choice(kinds)()
            yield

    def _place(self, after: int, payloads: list[int]) -> list[int]:
        gsn = max(after, self.log.sealed - 1)
        shard, gsns = self.random.choice(self.log.shards), []
        for payload in payloads:
            gsn += self.random.randint(1, 6)
            while gsn in self.log.held or gsn % SHARDS != shard:
                gsn += 1
            self.log.held[gsn] = (shard, payload)
            gsns.append(gsn)
        return gsns

    def _insert(self, name: str, payloads: Iterator[int], own: list[int]) -> Iterator[None]:
        rows = [next(payloads) for _ in range(self.random.choice([1, 1, 1, 2, 4]))]
        after = self.random.choice([0, *own[-1:], *list(self.log.held)[-3:]])
        op, sealed = self.op(name), self.chance(0.3)
        self.say(name, events.Insert(op, self.tick(), after, rows, sealed))
        yield
        if self.faults and self.chance(0.05):
            self.say(name, events.Failed(op, self.tick(), "UnavailableError", retriable=True))
            return
        if self.faults and self.chance(0.1):
            yield from self._doubtful(name, op, after, rows, own)
            return
        gsns = self._place(after, rows)
        yield
        if sealed:
            self.log.seal(gsns[-1] + 1)
            yield
        shards = [gsn % SHARDS for gsn in gsns]
        self.say(name, events.Inserted(op, self.tick(), gsns, shards))
        own += gsns

    def _doubtful(
        self, name: str, op: int, after: int, rows: list[int], own: list[int]
    ) -> Iterator[None]:
        self.say(name, events.Failed(op, self.tick(), "OutcomeUnknownError", retriable=False))
        yield
        gsns = self._place(after, rows) if self.chance(0.5) else []
        yield
        resolving = self.op(name)
        if self.chance(0.3):
            return
        self.say(name, events.Resolve(resolving, self.tick(), op))
        yield
        answer = gsns or [0] * len(rows)
        shards = [gsn % SHARDS for gsn in answer]
        self.log.seal(max(answer) + 1)
        self.say(name, events.Resolved(resolving, self.tick(), answer, shards))
        own += gsns

    def _read(self, name: str) -> Iterator[None]:
        gsn = self.random.randint(1, self.log.tail() + 3)
        op = self.op(name)
        self.say(name, events.Read(op, self.tick(), gsn, gsn % SHARDS))
        yield
        held = self.log.held.get(gsn)
        trim = self.log.trim
        yield
        if gsn < trim:
            self._trimmed(name, op, trim)
        elif held is None:
            self.say(name, events.Failed(op, self.tick(), "NoSuchRecordError", retriable=False))
        else:
            self.say(name, events.Found(op, self.tick(), held[1]))

    def _trimmed(self, name: str, op: int, first: int) -> None:
        line = events.Failed(op, self.tick(), "TrimmedError", retriable=False, first=first)
        self.say(name, line)

    def _tail(self, name: str) -> Iterator[None]:
        op, sealed = self.op(name), self.chance(0.5)
        self.say(name, events.Tail(op, self.tick(), sealed))
        yield
        tail = self.log.tail()
        for _, _, stop in self.log.losses:
            tail = max(tail, stop - 1)
        if sealed:
            yield
            self.log.seal(tail + 1)
        yield
        self.say(name, events.TailIs(op, self.tick(), tail))

    def _seal(self, name: str, own: list[int]) -> Iterator[None]:
        op, gsn = self.op(name), self.random.choice(own[-5:] or [0])
        self.say(name, events.Seal(op, self.tick(), gsn))
        yield
        self.log.seal(gsn + 1)
        yield
        self.say(name, events.Sealed(op, self.tick()))

    def _sync(self, name: str, own: list[int]) -> Iterator[None]:
        op = self.op(name)
        self.say(name, events.Sync(op, self.tick()))
        yield
        if not self.log.lost.isdisjoint(own):  # a lost record is on no disk
            self.say(name, events.Failed(op, self.tick(), "UnavailableError", retriable=True))
            return
        self.log.durable.update(own)
        self.say(name, events.Synced(op, self.tick(), max(own, default=0)))

    def _trim(self, name: str) -> Iterator[None]:
        gsn = self.random.choice([1, *list(self.log.held)[: len(self.log.held) // 4]])
        op = self.op(name)
        self.say(name, events.Trim(op, self.tick(), gsn))
        yield
        self.log.trim = max(self.log.trim, gsn)
        self.log.seal(gsn)
        yield
        self.say(name, events.Trimmed(op, self.tick()))

    def _deliver(self, name: str, op: int, start: int, stop: int) -> None:
        gsns = [gsn for gsn in sorted(self.log.held) if start <= gsn < stop]
        if gsns:
            rows = [self.log.held[gsn] for gsn in gsns]
            shards, payloads = [row[0] for row in rows], [row[1] for row in rows]
            self.say(name, events.Delivered(op, self.tick(), gsns, shards, payloads))

    def _scan(self, name: str, start: int) -> Iterator[None]:
        op = self.op(name)
        self.say(name, events.Subscribe(op, self.tick(), start, follow=False))
        yield
        stop = self.log.tail() + 1
        self.log.seal(stop)
        while True:
            if start < self.log.trim:
                self._trimmed(name, op, self.log.trim)
                return
            middle = min(stop, start + self.random.randint(1, 400))
            self._deliver(name, op, start, middle)
            start = middle
            if start >= stop:
                break
            yield
        self.say(name, events.Ended(op, self.tick()))

    def _subscriber(self, name: str) -> Iterator[None]:
        start, resumes = 1, 0
        while True:
            op = self.op(name)
            call = events.Subscribe(op, self.tick(), start, follow=True, resumes=resumes)
            self.say(name, call)
            resumes = op
            for _ in range(self.random.randint(1, 8)):
                yield
                if self.chance(0.2):
                    yield from self._barrier(name, op)
                if start < self.log.trim:
                    self._trimmed(name, op, self.log.trim)
                    start, resumes = self.log.trim, 0
                    break
                stop = self.log.tail() + self.random.randint(0, 2)
                self.log.seal(stop)
                self._deliver(name, op, start, stop)
                start = max(start, stop)

    def _barrier(self, name: str, of: int) -> Iterator[None]:
        op = self.op(name)
        self.say(name, events.Barrier(op, self.tick(), of))
        yield
        gsn = self.log.sealed
        yield
        self.say(name, events.Barred(op, self.tick(), gsn))

    # --- files ---

    def write(self, directory: Path) -> None:
        write(directory, self.lines)


def write(directory: Path, lines: dict[str, list[events.Event]]) -> None:
    """Write histories to a new directory."""
    directory.mkdir(parents=True)
    for name, said in lines.items():
        with events.Recorder(directory / f"{name}{events.SUFFIX}", name) as recorder:
            for event in said:
                recorder.result(event)
