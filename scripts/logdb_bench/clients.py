"""Closed-loop benchmark clients in up to four processes, and their results.

Clients are asyncio tasks, each with its own connection. Rule: an operation counts if it ended after
the warm-up and before the end. The actions of a client follow from its number and the plan's seed.
All processes share the monotonic clock.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from metrics.loops import exact_loop
from metrics.windows import percentile
from metrics.workers import Workers

from logdb_bench import delayed_inserts
from logdb_bench.workloads import Session, session

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from logdb_bench.plan import Plan

PROCESSES: Final = 4
#: Interval between the start signal and the first operation, in nanoseconds.
_LEAD_NS: Final = 50_000_000
#: Timeout of a client process, in seconds.
_TIMEOUT_S: Final = 120.0


class Tally(NamedTuple):
    """Completed and aborted operations of one kind."""

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

    def run(self, clients: int, seconds: float, warm_s: float) -> Outcome:
        """Run `clients` clients for `seconds` after `warm_s`.

        Raises:
            RuntimeError: a client failed; the message has its error.

        """
        count = min(clients, len(self.pipes))
        working = self.pipes[:count]
        for index, pipe in enumerate(working):
            pipe.send(range(index, clients, count))
        for pipe in working:
            _receive(pipe)
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
    if plan.hold_us:
        delayed_inserts.install(plan.hold_us)
    if not plan.is_inline:
        records_for_writes()
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


def records_for_writes() -> None:
    """Make each write of a transaction a separate record, as in the thesis (4.3)."""
    import logdb.client.operations  # noqa: PLC0415 - not for Redis

    logdb.client.operations.INLINE_BYTES = 0  # type: ignore[misc]


async def _serve(
    plan: Plan, numbers: range, pipe: Connection
) -> tuple[dict[str, Tally], int, float]:
    sessions = [session(plan, number) for number in numbers]
    for each in sessions:
        await each.connect()
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
