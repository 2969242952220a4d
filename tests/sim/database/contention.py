"""The effect of latency on contended transactions: `python -m tests.sim.database.contention`.

The thesis' benchmark of LogDB (T 4.4.6) in virtual time: closed-loop clients read one of ten keys
by chance, write it + 1 and commit; who is aborted begins anew, with another key. Every hop takes 40
to 60 µs. Processing time is not in it (a turn takes 2 µs, however much there is to do): what is
left is what the protocol's latency does to commits and aborts. What machines can do is another
question (scripts/logdb_bench/contention.py).

"900 µs" is the log with Scalog's inserts, by the class that holds them on real machines, too
(scripts/logdb_bench/delayed_inserts.py): acknowledgements, and what brings commit records to the
coordinator, wait until 900 µs after the call. What comes behind such a delivery waits with it, so
an attempt takes twice as long now and then.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest.mock import patch

import logdb.client.core
import logdb.client.operations
import logdb.coordinator.node
from logdb.client.requests import GetRequest, OpenRequest
from logdb.client.transaction import TransactionSets
from logdb.errors import TransactionAborted
from logdb.values import decode_value, encode_value
from tests.sim import programs
from tests.sim.cluster import SimCluster
from tests.sim.database.programs import add_client, add_coordinator, node_of
from tests.sim.plan import Database, draw
from tests.sim.simulated import simulated
from tests.simulator.kernel import MS, US, Kernel, S
from tests.simulator.network import Conditions

_SCRIPTS: Final = str(Path(__file__).resolve().parents[3] / "scripts")
if _SCRIPTS not in sys.path:  # the scripts are no package: their folder is where they are found
    sys.path.insert(0, _SCRIPTS)

from logdb_bench.delayed_inserts import SCALOG_US, DelayedCore  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from logdb.client.core import DatabaseCore
    from logdb.client.requests import Values
    from ziplog.client.common.requests import Request

    Task = Generator[Request, Any, None]

CLIENTS: Final = (1, 2, 4, 8, 16, 32, 64)
KEYS: Final = [b"%d" % number for number in range(10)]
_HOP_NS: Final = (40 * US, 60 * US)
#: Its sizes do not matter: no checkpoints, and ten values.
_DATABASE: Final = Database(
    coordinators=1, checkpoint_every=10**9, decisions=10**6, segment_bytes=10**9,
    inline_bytes=16 * 1024, cache_bytes=10**9,
)  # fmt: skip
_COORDINATOR: Final = "coordinator-0"
#: Servers start no new file in a run: no waits for a disk.
_SEGMENT_BYTES: Final = 64 * 1024 * 1024
_LIMIT_NS: Final = 60 * S
_REQUEST_TIMEOUT_NS: Final = 30 * S


class Line(NamedTuple):
    """One line of the tables."""

    is_inline: bool = True
    is_held: bool = False


LINES: Final = {
    "Ziplog": Line(),
    "Ziplog, a record per write": Line(is_inline=False),
    f"{SCALOG_US} µs": Line(is_held=True),
    f"{SCALOG_US} µs, a record per write": Line(is_inline=False, is_held=True),
}


class Point(NamedTuple):
    """The results for one number of clients."""

    commits_per_s: float
    #: Aborted attempts, divided by all attempts.
    abort_share: float
    #: Duration of a committed attempt, from its read to the decision.
    commit_p50_us: float


class Connections:
    """Frame delays: frames of one link keep their order, as with TCP.

    Reordered frames would be taken for lost ones, and requested 5 ms later (docs/protocol.md, 4).
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel: Final = kernel
        #: When the last frame of each link arrives.
        self._last: Final[dict[tuple[str, str], int]] = {}

    def carry(self, src: str, dst: str, _frame: bytes) -> int:
        """Return how long a frame takes, in ns."""
        now, random = self._kernel.now, self._kernel.random
        arrival = max(now + random.randint(*_HOP_NS), self._last.get((src, dst), 0))
        self._last[src, dst] = arrival
        return arrival - now


class _Tally:
    """Counts over all clients."""

    def __init__(self) -> None:
        #: Whether attempts are counted, and whether no more are started.
        self.is_counting = self.is_over = False
        #: Durations of counted commits, and the number of counted aborts.
        self.took_ns: Final[list[int]] = []
        self.aborted = 0
        #: All that were committed.
        self.done = 0
        self.connected = self.idle = 0
        #: The counters' sum in the end.
        self.total = -1

    def committed(self, took_ns: int) -> None:
        """Note a commit."""
        self.done += 1
        if self.is_counting:
            self.took_ns.append(took_ns)


class _Client:
    """One client; what it does is a generator that yields requests."""

    def __init__(self, cluster: SimCluster, number: int, tally: _Tally, seed: int) -> None:
        self.process: Final = add_client(cluster, f"client-{number}", [_COORDINATOR])
        self._kernel: Final = cluster.kernel
        self._tally: Final = tally
        self._random: Final = Random(f"{seed} {number}")
        self.process.start()

    def run(self, task: Task, result: Any = None) -> None:
        """Go on with what it does."""
        try:
            wanted = task.throw(result) if isinstance(result, BaseException) else task.send(result)
        except StopIteration:
            return
        program = self.process.program
        assert isinstance(program, programs.ClientProgram)
        program.call(wanted, partial(self.run, task))

    @property
    def _until(self) -> int:
        return self.process.clock() + _REQUEST_TIMEOUT_NS

    @property
    def _core(self) -> DatabaseCore:
        core: DatabaseCore = self.process.program.engine.core  # type: ignore[union-attr]
        return core

    def connect(self) -> Task:
        """Find the log."""
        yield OpenRequest(self._until)
        self._tally.connected += 1

    def work(self) -> Task:
        """Try one transaction after the other."""
        tally, kernel = self._tally, self._kernel
        while not tally.is_over:
            called = kernel.now
            try:
                yield from self._add_one(self._random.choice(KEYS))
            except TransactionAborted:
                tally.aborted += tally.is_counting
            else:
                tally.committed(kernel.now - called)
        tally.idle += 1

    def _add_one(self, key: bytes) -> Task:
        until = self._until
        transaction = TransactionSets(self._core.limits.max_payload_bytes)
        (value,) = yield from transaction.get([key], until)
        count = 0 if value is None else decode_value(value)
        transaction.write(key, encode_value(count + 1))
        yield from transaction.commit(until)

    def sum(self) -> Task:
        """Add the counters."""
        found: Values = yield GetRequest(self._until, KEYS, fresh=True)
        self._tally.total = sum(decode_value(value) for value in found.values if value is not None)


@contextmanager
def _as_said(line: Line) -> Iterator[None]:
    """Let clients and coordinators be those of a line."""
    held = partial(DelayedCore, wall_offset_us=0)  # In a run both clocks are the same.
    with (
        patch.object(logdb.client.operations, "INLINE_BYTES", 16 * 1024 * line.is_inline),
        patch.object(programs, "SEGMENT_BYTES", _SEGMENT_BYTES),
        patch.object(programs, "CACHE_BYTES", _SEGMENT_BYTES),
        patch.object(logdb.client.core, "ClientCore", held) if line.is_held else nullcontext(),
        patch.object(logdb.coordinator.node, "ClientCore", held) if line.is_held else nullcontext(),
    ):
        yield


def measure(
    line: Line, clients: int, *, shards: int, virtual_ms: int, warm_ms: int = 20, seed: int = 7
) -> Point:
    """Run one point.

    Args:
        line: what is measured.
        clients: how many, each with one transaction at a time.
        shards: of the log, with f=1.
        virtual_ms: for how long attempts that end are counted.
        warm_ms: before that.
        seed: of all chance.

    """
    plan = draw(1)._replace(
        shards=shards, f=1, durability="memory", mms=1, handlers=1, faults=(),
        naps=False, is_raft_real=False, conditions=Conditions(_HOP_NS), database=_DATABASE,
    )  # fmt: skip
    kernel, tally = Kernel(seed), _Tally()
    with _as_said(line), simulated(kernel):
        cluster = SimCluster(kernel, plan)
        cluster.begin()
        cluster.network.on_carry = Connections(kernel).carry
        process = add_coordinator(cluster, _COORDINATOR, _DATABASE, checkpoints=False)
        assert kernel.run_until(lambda: (node := node_of(process)) and node.is_ready, _LIMIT_NS)
        crew = [_Client(cluster, number, tally, seed) for number in range(clients)]
        _pass(kernel, crew, tally, warm_ms, virtual_ms)
    assert tally.total == tally.done, f"{tally.done} commits, and the counters say {tally.total}"
    commits = len(tally.took_ns)
    return Point(
        commits * 1000 / virtual_ms,
        tally.aborted / max(tally.aborted + commits, 1),
        statistics.median(tally.took_ns) / US if commits else 0.0,
    )


def _pass(
    kernel: Kernel, crew: Sequence[_Client], tally: _Tally, warm_ms: int, virtual_ms: int
) -> None:
    """Let clients connect, work for a while, and add up what is there."""
    for client in crew:
        client.run(client.connect())
    assert kernel.run_until(lambda: tally.connected == len(crew), _LIMIT_NS), "no connection"
    for client in crew:
        client.run(client.work())
    kernel.run(warm_ms * MS)
    tally.is_counting = True
    kernel.run(virtual_ms * MS)
    tally.is_counting, tally.is_over = False, True
    assert kernel.run_until(lambda: tally.idle == len(crew), _LIMIT_NS), "some attempts never end"
    crew[0].run(crew[0].sum())
    assert kernel.run_until(lambda: tally.total >= 0, _LIMIT_NS), "the counters cannot be read"


def _virtual_ms(clients: int, most_ms: int) -> int:
    """Return for how long a point is counted: for less time if more happens in it."""
    return max(most_ms // clients, 50)


def main() -> None:
    """Print a table for each number of shards; a row for each line and number of clients."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim.database.contention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shards", type=int, nargs="+", default=[6, 2])
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument(
        "--ms",
        type=int,
        default=2000,
        help="virtual milliseconds that one client is counted for; N clients: an Nth, at least 50",
    )
    arguments = parser.parse_args()
    for shards in arguments.shards:
        sys.stdout.write(f"\n{shards} shards; µs: the median of an attempt that commits\n")
        sys.stdout.write(f"{'':<28}{'clients':>8}{'commits/s':>11}{'% aborted':>11}{'µs':>7}\n")
        for name, line in LINES.items():
            for clients in arguments.clients:
                virtual_ms = _virtual_ms(clients, arguments.ms)
                point = measure(line, clients, shards=shards, virtual_ms=virtual_ms)
                sys.stdout.write(
                    f"{name:<28}{clients:>8}{point.commits_per_s:>11,.0f}"
                    f"{100 * point.abort_share:>11.1f}{point.commit_p50_us:>7,.0f}\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main()
