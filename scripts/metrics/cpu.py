"""The CPU time of processes, by thread, while something is done many times; and their placement."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ziplog.local import Cluster

#: Number of threads of a process that a report lists.
_THREADS: Final = 3


def spent(
    processes: dict[str, psutil.Process], act: Callable[[int], object], count: int
) -> dict[str, Any]:
    """Return what each process, and its busiest threads, spend on one of what `act(count)` does."""
    before = {name: threads_of(process) for name, process in processes.items()}
    act(count)
    result: dict[str, Any] = {}
    for name, process in processes.items():
        each = [
            tuple((now - then) / count * 1e6 for now, then in zip(times, was, strict=True))
            for thread, times in threads_of(process).items()
            if (was := before[name].get(thread))
        ]
        busiest = sorted(each, key=sum, reverse=True)[:_THREADS]
        result[name] = {
            "total_us": sum(map(sum, each)),
            "threads": ", ".join(f"{user:.0f} user + {kernel:.0f} sys" for user, kernel in busiest),
        }
    result["total_us"] = sum(of["total_us"] for of in result.values())
    return result


def servers_of(cluster: Cluster) -> dict[str, psutil.Process]:
    """Return the processes of a cluster's storage servers, by name."""
    names = [node.name for shard in cluster.config.shards for node in shard.replicas]
    return {name: psutil.Process(cluster.pid(name)) for name in names}


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU seconds of processes; those that have ended do not count."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def threads_of(process: psutil.Process) -> dict[int, tuple[float, float]]:
    """Return the seconds that each thread has spent, in user code and in the kernel."""
    return {thread.id: (thread.user_time, thread.system_time) for thread in process.threads()}


@contextmanager
def pinned(systems: Iterable[list[int]]) -> Iterator[None]:
    """Pin the first process of each system to one core; the others, and this one, to another.

    So a comparison shows the systems, and not where the scheduler put them. With a single core,
    nothing changes.
    """
    cores = sorted(os.sched_getaffinity(0))
    for first, *others in systems:
        _pin(first, cores[0])
        for pid in others:
            _pin(pid, cores[-1])
    _pin(os.getpid(), cores[-1])
    try:
        yield
    finally:
        for thread in threads_of(psutil.Process()):
            os.sched_setaffinity(thread, cores)


def _pin(pid: int, core: int) -> None:
    for thread in threads_of(psutil.Process(pid)):
        os.sched_setaffinity(thread, {core})
