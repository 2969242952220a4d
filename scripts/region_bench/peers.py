"""Other systems behind the same router (W11): JetStream, Redis, PostgreSQL.

A client in A, one insert at a time, in turns: at the shard AB, and at each system whose leader is
in A. Then the server in A is killed, and a client in B inserts until one insert is acknowledged.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from metrics.rounds import ratio
from metrics.windows import percentile
from metrics.workers import Workers
from region_trial.trial import REGIONS

from region_bench import systems
from region_bench.bed import alternate, latencies, set_far

if TYPE_CHECKING:
    from collections.abc import Callable

    from region_bench.bed import Bed

Figures = dict[str, Any]

_ROUNDS: Final = 3
_SECONDS: Final = 3.0
#: Time in which a system may elect another leader.
_FAILOVER_S: Final = 30.0


def beside(bed: Bed, scale: float) -> Figures:
    """W11."""
    seconds = max(1.0, _SECONDS * scale)
    with contextlib.ExitStack() as stack:
        set_far(bed.network, is_far=False)
        actions: dict[str, Callable[[], list[float]]] = {
            "ziplog": lambda: bed.call("A", "insert", seconds=seconds, shard=0)
        }
        running = {}
        for kind, system in systems.SYSTEMS.items():
            if system.is_installed():
                server = stack.enter_context(system(bed.network))
                clients = stack.enter_context(
                    Workers(systems.run, [(bed.network.pid, 0, kind, server.hosts)])
                )
                clients.receive()
                actions[kind] = _inserting(clients, seconds)
                running[kind] = server
        found = _in_turns(bed, actions)
        for kind, server in running.items():
            found[kind]["name"] = server.name
            found[kind]["leader_lost_s"] = (
                _failover(bed, kind, server) if server.fails_over else None
            )
    return {"W11": found}


def _inserting(clients: Workers, seconds: float) -> Callable[[], list[float]]:
    def act() -> list[float]:
        clients.send(("insert", seconds))
        (latencies,) = clients.receive()
        found: list[float] = latencies
        return found

    return act


def _in_turns(bed: Bed, actions: dict[str, Callable[[], list[float]]]) -> Figures:
    results = alternate(
        bed.network, lambda: {name: act() for name, act in actions.items()}, _ROUNDS
    )
    found = {
        name: latencies({k: [one[name] for one in rounds] for k, rounds in results.items()})
        for name in actions
    }
    ours = [percentile(one["ziplog"], 50) or 0.0 for one in results["far"]]
    for name, row in found.items():
        theirs = [percentile(one[name], 50) or 0.0 for one in results["far"]]
        row["ziplog_p50_of_this"] = round(ratio(ours, theirs), 3)
    return found


def _failover(bed: Bed, kind: str, server: systems.System) -> float | None:
    """Kill the leader's server; return the seconds until a client in B has an insert done."""
    set_far(bed.network, is_far=True)
    near_first = [server.hosts[1], server.hosts[2], server.hosts[0]]
    arguments = [(bed.network.pid, REGIONS.index("B"), kind, near_first)]
    with Workers(systems.run, arguments) as clients:
        clients.receive()
        server.kill("A")
        clients.send(("until", _FAILOVER_S))
        (seconds,) = clients.receive()
    return seconds
