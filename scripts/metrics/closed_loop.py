"""Closed-loop clients in up to four processes, and their results.

Clients are asyncio tasks, each with its own connection and one operation at a time. Rule: an
operation counts if it ended after the warm-up and before the end. All processes share the monotonic
clock.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from metrics.windows import percentile
from metrics.workers import Workers, exact_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

PROCESSES: Final = 4
#: Interval between the start signal and the first operation, in nanoseconds.
_LEAD_NS: Final = 50_000_000
#: Timeout of a client process, in seconds.
_TIMEOUT_S: Final = 120.0
#: Number of clients of a process that connect at the same time.
_CONNECTING: Final = 25


#: The kind of an operation, whether it completed, and how many of its attempts were in vain.
Done = tuple[str, bool, int]


class Session(Protocol):
    """One client."""

    async def connect(self) -> None:
        """Connect."""
        ...

    async def act(self) -> Done:
        """Do one operation."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class Plan(Protocol):
    """What all clients of a run do; sent to their processes."""

    def prepare(self) -> None:
        """Change a client process before it has clients."""
        ...

    def session(self, number: int) -> Session:
        """Return client `number`; its actions follow from the plan and its number."""
        ...


class Tally(NamedTuple):
    """Completed operations of one kind, and attempts in vain."""

    #: Duration of each operation, in microseconds.
    took_us: list[int]
    aborted: int

    def figures(self, seconds: float) -> dict[str, Any]:
        """Return rates, the share of aborted attempts, and percentiles."""
        done = len(self.took_us)
        return {
            "per_s": done / seconds,
            "abort_share": self.aborted / max(self.aborted + done, 1),
            "p50_us": percentile(self.took_us, 50),
            "p99_us": percentile(self.took_us, 99),
            "count": done,
            "aborted": self.aborted,
        }


def merged(tallies: Sequence[dict[str, Tally]]) -> dict[str, Tally]:
    """Return the sums of several tallies."""
    names = sorted({name for tally in tallies for name in tally})
    return {
        name: Tally(
            [took for tally in tallies if name in tally for took in tally[name].took_us],
            sum(tally[name].aborted for tally in tallies if name in tally),
        )
        for name in names
    }


def medians(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[str, float | None]:
    """Return the medians of some figures over rounds, of the values that are not None."""
    known = {key: [row[key] for row in rows if row[key] is not None] for key in keys}
    return {key: statistics.median(values) if values else None for key, values in known.items()}


class Outcome(NamedTuple):
    """Result of a run."""

    seconds: float
    #: Operations within the measured time, by kind.
    tallies: dict[str, Tally]
    #: All completed operations.
    done: int
    #: CPU seconds of the clients.
    cpu_s: float

    @property
    def all(self) -> Tally:
        """Return the tally of all kinds."""
        tallies = self.tallies.values()
        return Tally([us for t in tallies for us in t.took_us], sum(t.aborted for t in tallies))


class ClientProcesses(Workers):
    """The client processes of a plan."""

    def __init__(self, plan: Plan, processes: int = PROCESSES) -> None:
        """Start them."""
        super().__init__(_work, [(plan,)] * processes)

    def run(
        self,
        clients: int,
        seconds: float,
        warm_s: float,
        on_connected: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Run `clients` clients for `seconds` after `warm_s`; first call `on_connected`.

        Raises:
            RuntimeError: a client failed; the message has its error.

        """
        count = min(clients, len(self.pipes))
        working = self.pipes[:count]
        for index, pipe in enumerate(working):
            pipe.send(range(index, clients, count))
        for pipe in working:
            _receive(pipe)
        on_connected()
        begin = time.monotonic_ns() + _LEAD_NS
        for pipe in working:
            pipe.send((begin, begin + int(warm_s * 1e9), begin + int((warm_s + seconds) * 1e9)))
        results = [_receive(pipe) for pipe in working]
        return Outcome(
            seconds,
            merged([tallies for tallies, _, _ in results]),
            sum(done for _, done, _ in results),
            sum(cpu for _, _, cpu in results),
        )


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(_TIMEOUT_S):
        raise RuntimeError(f"a client process did not answer for {_TIMEOUT_S:g} s")
    result, failure = pipe.recv()
    if failure:
        raise RuntimeError(f"a client failed: {failure}")
    return result


# --- in a client process ---


def _work(plan: Plan, pipe: Connection) -> None:
    plan.prepare()
    while True:
        try:
            numbers = pipe.recv()
        except EOFError:
            return
        with asyncio.Runner(loop_factory=exact_loop) as runner:
            try:
                pipe.send((runner.run(_serve(plan, numbers, pipe)), ""))
            except Exception as error:  # noqa: BLE001 - the parent process reports it
                pipe.send((None, f"{type(error).__name__}: {error}"))


async def _serve(
    plan: Plan, numbers: range, pipe: Connection
) -> tuple[dict[str, Tally], int, float]:
    sessions = [plan.session(number) for number in numbers]
    gate = asyncio.Semaphore(_CONNECTING)

    async def connect(each: Session) -> None:
        async with gate:
            await each.connect()

    await asyncio.gather(*map(connect, sessions))
    gc.collect()
    gc.freeze()
    pipe.send(("ready", ""))
    begin, counted, end = await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
    cpu = time.process_time()
    loops = [_loop(each, begin, counted, end) for each in sessions]
    results = await asyncio.gather(*loops)
    cpu = time.process_time() - cpu
    for each in sessions:
        await each.close()
    return merged([tallies for tallies, _ in results]), sum(done for _, done in results), cpu


async def _loop(
    client: Session, begin: int, counted: int, end: int
) -> tuple[dict[str, Tally], int]:
    """Run until the end; return the tallies, and the number of all completed operations."""
    clock = time.monotonic_ns
    took: dict[str, list[int]] = {}
    aborted: dict[str, int] = {}
    total = 0
    await asyncio.sleep(max(begin - clock(), 0) / 1e9)
    while (called := clock()) < end:
        name, is_done, aborts = await client.act()
        done = clock()
        total += is_done
        if counted < done <= end:
            aborted[name] = aborted.get(name, 0) + aborts
            took.setdefault(name, [])
            if is_done:
                took[name].append((done - called) // 1000)
    return {name: Tally(took[name], aborted[name]) for name in took}, total
