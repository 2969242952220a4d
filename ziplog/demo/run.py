"""Runs the demo's processes and collects their results.

2 shards x 2 replicas. Several processes insert, each for its own aircraft; another process
subscribes from the beginning and checks order, chains, count and contents. The last events are
inserted one at a time, after the load, to measure the latency of a single insert. At last a player
copies the log into SQLite, and is killed in the middle.
"""

from __future__ import annotations

import contextlib
import queue
import statistics
import subprocess
import threading
import time
import zlib
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

import ziplog
from ziplog.demo import flights
from ziplog.demo.parts import Delivered, Inserted, Progress, Report
from ziplog.demo.playing import Played, play
from ziplog.errors import UnavailableError
from ziplog.local import Cluster
from ziplog.runtime.child_processes import environment, python

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Self

    from ziplog.config import ClusterConfig
    from ziplog.demo.flights import Flight

    #: Called with "convert", "insert", "deliver" or "play", and the number of records done.
    OnProgress = Callable[[str, int], None]

#: Number of the last events that are inserted one by one (at most a tenth of all).
SINGLES: Final = 2000
_BATCH: Final = 2048
#: Time without a report of any process, after which the demo fails.
_TIMEOUT_S: Final = 90.0
_decode: Final = msgspec.json.Decoder(Report).decode


class Summary(msgspec.Struct, frozen=True):
    """The results of the demo."""

    inserted: int
    delivered: int
    same_contents: bool
    #: The first fault that the subscriber saw, or "".
    fault: str
    first: str
    last: str
    aircraft: int
    shards: int
    replicas: int
    durability: str
    clients: int
    #: From the first insert to the last ack of the batches.
    insert_s: float
    #: From the first insert until the subscriber had the last record.
    total_s: float
    batched: int
    p50_us: float
    p99_us: float
    singles: int
    fast_path_share: float
    retries: int
    #: The copy in SQLite; it is complete: it has each record once, in order.
    played: Played
    is_complete: bool

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        is_read = self.inserted == self.delivered and self.same_contents and not self.fault
        return is_read and self.is_complete


def run(
    directory: Path, found: list[Flight], events: int, clients: int, on_progress: OnProgress
) -> Summary:
    """Run the demo in an empty directory.

    Args:
        directory: for the files of the cluster and of the events.
        found: flights that make at least that many events.
        events: the number of events, from 1.
        clients: the number of inserter processes, from 1.
        on_progress: called with the progress of each stage.

    Raises:
        UnavailableError: a process failed; says why.

    """
    shares, last = _write_events(directory, found, events, clients, on_progress)
    with Cluster(directory / "cluster", name="demo") as cluster, _Workers(directory) as workers:
        address = ("--bootstrap", cluster.endpoint)
        began = time.monotonic()
        workers.start("subscriber", "deliver", *address, "--records", str(events))
        for share in shares:
            workers.start(
                "inserter", "insert", *address, "--file", str(share), "--batch", str(_BATCH)
            )
        batched = workers.inserted(len(shares), on_progress)
        insert_s = time.monotonic() - began
        after = str(max(ziplog.RecordId.parse(result.last) for result in batched))
        workers.start("inserter", "insert", *address, "--file", str(last), "--after", after)
        singles = workers.inserted(1, on_progress)[0]
        delivered = workers.delivered(on_progress)
        total_s = time.monotonic() - began
        played = play(directory, cluster.endpoint, events, partial(on_progress, "play"))
        config = cluster.config
        return _summary(config, batched, singles, delivered, played, insert_s, total_s)


def _write_events(
    directory: Path, found: list[Flight], count: int, clients: int, on_progress: OnProgress
) -> tuple[list[Path], Path]:
    """Write the events into one file for each client, and the last ones into another."""
    shares = [directory / f"events-{index}.jsonl" for index in range(clients)]
    last = directory / "events-last.jsonl"
    encode = msgspec.json.Encoder().encode
    singly_from = count - min(SINGLES, max(1, count // 10))
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in shares]
        last_file = stack.enter_context(last.open("wb"))
        for index, event in enumerate(flights.events(found, count)):
            share = files[zlib.crc32(event.aircraft.encode()) % clients]
            (share if index < singly_from else last_file).write(encode(event) + b"\n")
            if index % 8192 == 0:
                on_progress("convert", index)
    on_progress("convert", count)
    return shares, last


def _summary(
    config: ClusterConfig,
    batched: list[Inserted],
    singles: Inserted,
    delivered: Delivered,
    played: Played,
    insert_s: float,
    total_s: float,
) -> Summary:
    every = [*batched, singles]
    fast = sum(result.fast_path for result in every)
    units = fast + sum(result.slow_path for result in every)
    contents = sum(result.checksum for result in every) % 2**64
    cuts = statistics.quantiles(singles.latencies_us * 2, n=100, method="inclusive")
    return Summary(
        inserted=sum(result.records for result in every),
        delivered=delivered.records,
        same_contents=contents == delivered.checksum,
        fault=delivered.fault,
        first=delivered.first,
        last=delivered.last,
        aircraft=delivered.aircraft,
        shards=len(config.shards),
        replicas=config.f + 1,
        durability=config.durability,
        clients=len(batched),
        insert_s=insert_s,
        total_s=total_s,
        batched=sum(result.records for result in batched),
        p50_us=cuts[49],
        p99_us=cuts[98],
        singles=singles.records,
        fast_path_share=fast / max(1, units),
        retries=sum(result.retries for result in every),
        played=played,
        is_complete=(played.positions, played.late, played.checksum) == (played.rows, 0, contents),
    )


class _Workers:
    """The processes of the demo and their reports."""

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory
        self._processes: Final[list[subprocess.Popen[bytes]]] = []
        #: (number of the process, its report; None: it ended).
        self._reports: Final[queue.SimpleQueue[tuple[int, Report | None]]] = queue.SimpleQueue()
        self._stages: Final[list[str]] = []
        self._done: Final[list[int]] = []
        self._inserted: list[Inserted] = []
        self._delivered: Delivered | None = None

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the processes that still run."""
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def start(self, module: str, stage: str, *arguments: str) -> None:
        """Start `python -m ziplog.demo.MODULE`; its progress counts for `stage`."""
        number = len(self._processes)
        with self._errors(number).open("wb") as errors:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
                python(f"ziplog.demo.{module}", *arguments),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._processes.append(process)
        self._stages.append(stage)
        self._done.append(0)
        threading.Thread(target=self._read, args=(number, process), daemon=True).start()

    def inserted(self, count: int, on_progress: OnProgress) -> list[Inserted]:
        """Wait for the results of `count` inserters and return them."""
        while len(self._inserted) < count:
            self._wait(on_progress)
        results, self._inserted = self._inserted, []
        return results

    def delivered(self, on_progress: OnProgress) -> Delivered:
        """Wait for the subscriber's result and return it."""
        while self._delivered is None:
            self._wait(on_progress)
        return self._delivered

    def _wait(self, on_progress: OnProgress) -> None:
        try:
            number, report = self._reports.get(timeout=_TIMEOUT_S)
        except queue.Empty:
            raise UnavailableError(
                f"no process of the demo reported progress for {_TIMEOUT_S:g} s"
            ) from None
        match report:
            case Progress(done=done):
                self._done[number] = done
            case Inserted(records=done):
                self._done[number] = done
                self._inserted.append(report)
            case Delivered(records=done):
                self._done[number] = done
                self._delivered = report
            case None:
                self._check_end(number)
        stage = self._stages[number]
        done = sum(n for n, its in zip(self._done, self._stages, strict=True) if its == stage)
        on_progress(stage, done)

    def _check_end(self, number: int) -> None:
        if self._processes[number].wait() != 0:
            lines = self._errors(number).read_text(errors="replace").split("\n")
            last_line = next((line for line in reversed(lines) if line), "no error message")
            raise UnavailableError(f"a process of the demo failed: {last_line}")

    def _read(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        # The main thread closes the pipe if the demo ends early.
        with contextlib.suppress(ValueError):
            for line in process.stdout:
                self._reports.put((number, _decode(line)))
        self._reports.put((number, None))

    def _errors(self, number: int) -> Path:
        return self._directory / f"worker-{number}.log"
