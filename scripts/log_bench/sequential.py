"""Delivery latency: from insert to delivery (T 4.4.4, sequential access), and the cost of no-ops.

`one_client`: one blocking client, random shards, beside its insert latency. `pauses`:
open loops with pauses of U(0, 2T), each shard at the same rate (T Fig. 4.6). `no_ops`: their
cost there, and in epochs of 100 records as in the thesis, beside the cost of the thesis'
timeouts. `steps`: one shard's rate goes up by a half, and down by a half. `bursts`: one shard gets
five times its rate for 100 ms, with and without lag-fix (Bhat et al., SpecLog, OSDI 2025, Fig. 10).
"""

from __future__ import annotations

import math
import statistics
import struct
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from metrics import noops
from metrics.leases import leases_of, share_of
from metrics.load import Client, Load, Outcome
from metrics.picture import BLUE, GREY, LIGHT_GREY, OCHRE, axes
from metrics.setup import cluster as new_cluster
from metrics.windows import distribution, latency_ms, percentile_ms, phases, sorted_in
from metrics.workers import Workers

import ziplog

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

    from ziplog.client.common.lease_map import LeaseMap

Figures = dict[str, Any]

_STAMP: Final = struct.Struct("<q")
_SIZE: Final = 4096
_EPOCH_MS: Final = 10

#: Open loops: shards, inserts a second at each, and clients of each.
_SHARDS: Final = 4
_PER_S: Final = 100
_CROWDS: Final = (1, 4, 12)
#: Epochs in which 100 records of each shard are expected.
_LONG_EPOCH_MS: Final = 1000

#: Steps: the same, the shard that changes, the rates that it goes through, and drawn windows.
_STEP_SHARDS: Final = 2
_STEP_PER_S: Final = 300
_STEP_CLIENTS: Final = 6
_RATES: Final = (1.0, 1.5, 1.0, 0.5)
_STEP_WINDOW_S: Final = 0.1

#: Bursts: the same, how often, for how long, and by how much.
_BURST_SHARDS: Final = 2
_BURST_PER_S: Final = 160
_BURST_CLIENTS: Final = 4
_BURST_EVERY_S: Final = 1.0
_BURST_S: Final = 0.1
_BURST_FACTOR: Final = 5
_BURST_WINDOW_S: Final = 0.02


def measure(scale: float) -> Figures:
    """Run all parts; `scale` 1 takes less than three minutes."""
    return {
        "one_client": one_client(max(300, int(3000 * scale))),
        "pauses": pauses(max(2.0, 8 * scale)),
        "no_ops": no_ops(max(3.0, 8 * scale)),
        "steps": steps(max(2.0, 4 * scale), rounds=2),
        "bursts": bursts(max(3, int(8 * scale))),
    }


# --- one client ----------------------------------------------------------------------------------


def one_client(count: int) -> Figures:
    """Insert `count` records sequentially; 1, 2 and 6 shards."""
    return {f"{shards} shards": _one_by_one(shards, count) for shards in (1, 2, 6)}


def _one_by_one(shards: int, count: int) -> Figures:
    with (
        new_cluster(shards=shards) as cluster,
        cluster.connect() as log,
        Workers(_follow, [(cluster.endpoint, count)]) as follower,
    ):
        filler = bytes(_SIZE - _STAMP.size)
        log.insert_after(_STAMP.pack(0) + filler)
        follower.receive()
        inserts = []
        for _ in range(count):
            stamp = time.monotonic_ns()
            log.insert_after(_STAMP.pack(stamp) + filler)
            inserts.append((time.monotonic_ns() - stamp) / 1e9)
        (delivered,) = follower.receive()
    insert, delivery = latency_ms(inserts), latency_ms(delivered)
    ratio = delivery["p50_ms"] / insert["p50_ms"]
    return {"insert": insert, "delivery": delivery, "p50_ratio": ratio}


def _follow(endpoint: str, count: int, pipe: Connection) -> None:
    """Follow the log; send the seconds from insert to delivery of `count` records."""
    with ziplog.connect(endpoint) as log, log.subscribe(ziplog.RID_GENESIS) as subscription:
        next(subscription)
        pipe.send("ready")
        delays = []
        for record in subscription:
            stamp = _STAMP.unpack_from(record.payload)[0]
            delays.append((time.monotonic_ns() - stamp) / 1e9)
            if len(delays) == count:
                break
    pipe.send(delays)


# --- open loops ----------------------------------------------------------------------------------


def _crowd(
    shard: int, first: int, count: int, per_s: float, spans: tuple[tuple[float, float], ...]
) -> list[Client]:
    """Return `count` clients, numbered from `first`, with a total rate of `per_s` at `shard`."""
    return [
        Client(number, count / per_s, str(shard), spans) for number in range(first, first + count)
    ]


def _run(
    clients: list[Client],
    shards: int,
    seed: int,
    *,
    epoch_ms: int = _EPOCH_MS,
    lag_fix: bool = True,
) -> tuple[Outcome, LeaseMap, list[list[noops.Stored]]]:
    """Run a load on a cluster of its own; return also its leases, and what its primaries stored."""
    with new_cluster(shards=shards, epoch_ms=epoch_ms, lag_fix=lag_fix) as cluster:
        with Load(cluster.endpoint, clients, seed=seed, size=_SIZE) as load:
            load.begin()
            outcome = load.finish()
        leases = leases_of(cluster.endpoint)
        cluster.stop()
        folder = cluster.config.data_dir
        stored = [noops.stored(folder / f"shard-{shard}-0") for shard in range(shards)]
    return outcome, leases, stored


def pauses(seconds: float) -> Figures:
    """Vary the clients of each shard at the same rate, and with them their pauses."""
    result: Figures = {"shards": _SHARDS, "per_s_and_shard": _PER_S}
    return result | {_name(crowd): _open_loop(crowd, seconds, _EPOCH_MS) for crowd in _CROWDS}


def _name(crowd: int) -> str:
    return f"T = {crowd / _PER_S * 1000:g} ms"


def _open_loop(crowd: int, seconds: float, epoch_ms: int) -> Figures:
    """Run `crowd` clients of each shard."""
    clients = [
        client
        for shard in range(_SHARDS)
        for client in _crowd(shard, shard * crowd, crowd, _PER_S, ((0.0, seconds),))
    ]
    outcome, leases, stored = _run(clients, _SHARDS, seed=crowd, epoch_ms=epoch_ms)
    delivered = [took for _, took in outcome.delivery_s()]
    points = distribution(delivered, 200)
    return {
        "clients_a_shard": crowd,
        "insert": latency_ms(took for _, took in outcome.insert_s()),
        "delivery": latency_ms(delivered),
        "no_ops": _no_ops(outcome, leases, stored, seconds, epoch_ms),
        **outcome.health(),
        # (ms, share of the values that are not above)
        "windows": {"delivery_ms": [(round(s * 1000, 3), round(of, 4)) for s, of in points]},
    }


# --- no-ops --------------------------------------------------------------------------------------


def no_ops(seconds: float) -> Figures:
    """Return what no-ops cost in long epochs: as many records of each shard in one as in T 4.4."""
    result: Figures = {"shards": _SHARDS, "per_s_and_shard": _PER_S, "epoch_ms": _LONG_EPOCH_MS}
    for crowd in (_CROWDS[0], _CROWDS[-1]):
        result[_name(crowd)] = _open_loop(crowd, seconds, _LONG_EPOCH_MS)
    return result


def _no_ops(
    outcome: Outcome,
    leases: LeaseMap,
    stored: list[list[noops.Stored]],
    seconds: float,
    epoch_ms: int,
) -> Figures:
    """Return figures per second and shard: measured, and for timeouts of 0 and of a mean gap."""
    gsns = [insert.gsn for insert in outcome.inserts if insert.gsn >= 0]
    first, last = min(gsns), max(gsns)
    costs = [
        noops.cost([e for e in entries if first <= e.first <= last], shard, leases.lease_at)
        for shard, entries in enumerate(stored)
    ]
    arrivals = [
        sorted(outcome.seconds(i.called) for i in outcome.inserts if i.shard == shard)
        for shard in range(len(costs))
    ]
    each = seconds * len(costs)
    figures = {name: sum(cost[name] for cost in costs) / each for name in costs[0]}

    def timed(timeout_s: float) -> float:
        made = (
            noops.after_timeouts(at, seconds, len(at) / seconds, epoch_ms / 1000, timeout_s)
            for at in arrivals
        )
        return sum(made) / each

    return {
        "records_per_s": figures["records"],
        "entries_within_epochs_per_s": figures["within"],
        "positions_within_epochs_per_s": figures["positions"],
        "entries_at_ends_per_s": figures["ends"],
        "bytes_per_s": figures["bytes"],
        "share_of_bytes": figures["bytes"] / figures["all_bytes"],
        "thesis_entries_timeout_0_per_s": timed(0),
        "thesis_entries_timeout_mean_gap_per_s": timed(1 / _PER_S),
    }


# --- steps ---------------------------------------------------------------------------------------


def steps(phase_s: float, rounds: int) -> Figures:
    """Change shard 0's rate every `phase_s`; when is a new weight in force?"""
    rates = _RATES * rounds
    spans = [(i * phase_s, (i + 1) * phase_s, rate) for i, rate in enumerate(rates)]
    half = _STEP_CLIENTS // 2
    clients = []
    for part in range(3):
        # Each part of shard 0's clients is half of its usual rate.
        own = _joined((start, stop) for start, stop, rate in spans if rate > part / 2)
        clients += _crowd(0, part * half, half, _STEP_PER_S / 2, own)
    whole = ((0.0, len(rates) * phase_s),)
    for shard in range(1, _STEP_SHARDS):
        clients += _crowd(shard, 100 * shard, _STEP_CLIENTS, _STEP_PER_S, whole)
    outcome, leases, _ = _run(clients, _STEP_SHARDS, seed=1)
    found = list(_changes(outcome, leases, spans))
    took = [change["weights_after_ms"] for change in found if change["weights_after_ms"]]
    return {
        "shards": _STEP_SHARDS,
        "per_s_and_shard": _STEP_PER_S,
        "epoch_ms": _EPOCH_MS,
        "weights_after_p50_ms": statistics.median(took) if took else None,
        "weights_after_p50_epochs": statistics.median(took) / _EPOCH_MS if took else None,
        "changes": found,
        **outcome.health(),
        "windows": {
            "width_s": _STEP_WINDOW_S,
            "the shard": _over_time(outcome, whole[0][1], is_own=True),
            "other shards": _over_time(outcome, whole[0][1], is_own=False),
        },
    }


def _joined(spans: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return spans, in order, with those that touch made one."""
    joined: list[tuple[float, float]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]  # noqa: PLW2901
        joined.append((start, stop))
    return tuple(joined)


def _changes(
    outcome: Outcome, leases: LeaseMap, spans: list[tuple[float, float, float]]
) -> Iterator[Figures]:
    """Yield the result of each change of shard 0's rate.

    A weight is in force once a record was inserted into a lease in which the shard's weight is
    closer to the new rate than to the old one.
    """
    inserts = sorted((i for i in outcome.inserts if i.gsn >= 0), key=lambda insert: insert.called)
    figures = [(outcome.seconds(i.called), _share(leases, i.gsn), i.shard) for i in inserts]
    delays = [(outcome.seconds(i.called), i.shard, took) for i, took in outcome.delivery_s()]
    for (_, _, old), (start, stop, new) in pairwise(spans):
        middle = math.sqrt(old * new)
        before = next((share for at, share, _ in reversed(figures) if at < start), 0.0)
        after = next(
            (
                at
                for at, share, _ in figures
                if start <= at < stop and (share > middle) == (new > old)
            ),
            None,
        )
        was_right = (before > middle) == (old > new)
        until = stop if after is None else after
        own = sum(start <= at < until and shard == 0 for at, _, shard in figures)
        yield {
            "from": old,
            "to": new,
            "at_s": start,
            "weights_after_ms": (after - start) * 1000 if after is not None and was_right else None,
            "inserts_until_then": own,
            "delivery_until_then": latency_ms(
                took for at, shard, took in delays if start <= at < until and shard == 0
            ),
            "delivery_from_then_on": latency_ms(
                took for at, shard, took in delays if until <= at < stop and shard == 0
            ),
        }


def _share(leases: LeaseMap, gsn: int) -> float:
    lease = leases.lease_at(gsn)
    assert lease is not None, f"position {gsn} was never assigned"
    return share_of(lease, 0)


def _over_time(outcome: Outcome, seconds: float, *, is_own: bool) -> list[float | None]:
    pairs = (
        (outcome.seconds(i.called), took)
        for i, took in outcome.delivery_s()
        if (i.shard == 0) == is_own
    )
    return [percentile_ms(values, 50) for values in sorted_in(pairs, 0, seconds, _STEP_WINDOW_S)]


# --- bursts --------------------------------------------------------------------------------------


def bursts(count: int) -> Figures:
    """Send `count` bursts to shard 0, one per second, with and without lag-fix."""
    starts = [_BURST_EVERY_S * number for number in range(1, count + 1)]
    stop = starts[-1] + _BURST_EVERY_S
    clients: list[Client] = []
    for shard in range(_BURST_SHARDS):
        clients += _crowd(shard, 10 * shard, _BURST_CLIENTS, _BURST_PER_S, ((0.0, stop),))
    more = _BURST_PER_S * (_BURST_FACTOR - 1)
    spans = tuple((start, start + _BURST_S) for start in starts)
    clients += _crowd(0, 100, _BURST_CLIENTS, more, spans)
    result: Figures = {"shards": _BURST_SHARDS, "per_s_and_shard": _BURST_PER_S}
    for name, lag_fix in (("lag-fix", True), ("no lag-fix", False)):
        outcome, _, _ = _run(clients, _BURST_SHARDS, seed=1, lag_fix=lag_fix)
        delays = [(outcome.seconds(i.called), took) for i, took in outcome.delivery_s()]
        laid = phases(delays, starts, _BURST_EVERY_S, _BURST_WINDOW_S)
        edge = round(_BURST_S / _BURST_WINDOW_S)
        result[name] = {
            "in_bursts": latency_ms(took for row in laid[:edge] for took in row),
            "just_after": latency_ms(took for row in laid[edge : 2 * edge] for took in row),
            "otherwise": latency_ms(took for row in laid[2 * edge :] for took in row),
            "insert": latency_ms(took for _, took in outcome.insert_s()),
            **outcome.health(),
            "windows": {
                "width_s": _BURST_WINDOW_S,
                **{f"p{p}_ms": [percentile_ms(row, p) for row in laid] for p in (50, 99)},
            },
        }
    return result


# --- the picture ---------------------------------------------------------------------------------


def draw(result: Figures, path: Path) -> None:
    """Draw the distributions, the steps and the bursts."""
    with axes(path, 1, 3, (15, 4.2)) as (distributions, rates, bursts):
        _draw_distributions(distributions, result["pauses"], result["no_ops"])
        _draw_steps(rates, result["steps"])
        _draw_bursts(bursts, result["bursts"])


def _loops(result: Figures) -> dict[str, Figures]:
    return {name: of for name, of in result.items() if name.startswith("T = ")}


def _draw_distributions(axis: Any, result: Figures, long: Figures) -> None:
    for of, line, epoch_ms in ((result, "-", _EPOCH_MS), (long, "--", long["epoch_ms"])):
        for name, loop in _loops(of).items():
            points = zip(*loop["windows"]["delivery_ms"], strict=True)
            colour = f"C{list(_loops(result)).index(name)}"
            axis.plot(*points, line, color=colour, label=f"{name}, epochs of {epoch_ms} ms")
    axis.set(xlabel="ms from insert to delivery", ylabel="share of the records", xscale="log")
    axis.set_title(f"pauses U(0, 2T), {result['shards']} x {result['per_s_and_shard']}/s")
    axis.legend(fontsize="small")


def _draw_steps(axis: Any, result: Figures) -> None:
    windows = result["windows"]
    for name, colour in (("other shards", LIGHT_GREY), ("the shard", BLUE)):
        at = [(index + 0.5) * windows["width_s"] for index in range(len(windows[name]))]
        axis.plot(
            at, [math.nan if v is None else v for v in windows[name]], color=colour, label=name
        )
    for change in result["changes"]:
        axis.axvline(change["at_s"], color=GREY, linestyle=":")
        axis.annotate(
            f"x{change['to']:g}", (change["at_s"], 1), xycoords=("data", "axes fraction"),
            xytext=(2, -10), textcoords="offset points", fontsize="small",
        )  # fmt: skip
        if change["weights_after_ms"] is not None:
            stop = change["at_s"] + change["weights_after_ms"] / 1000
            axis.axvspan(change["at_s"], stop, color=OCHRE, alpha=0.4, linewidth=0)
    axis.set_xlabel("seconds (shaded: until the new weights are in force)")
    axis.set(ylabel="ms to delivery, p50", ylim=(0, None))
    axis.legend()


def _draw_bursts(axis: Any, result: Figures) -> None:
    for name, colour in (("no lag-fix", OCHRE), ("lag-fix", BLUE)):
        windows = result[name]["windows"]
        for percent, line in ((50, "-"), (99, ":")):
            row = windows[f"p{percent}_ms"]
            at = [(index + 0.5) * windows["width_s"] * 1000 for index in range(len(row))]
            row = [math.nan if value is None else value for value in row]
            axis.plot(at, row, line, color=colour, label=f"{name}, p{percent}")
    axis.axvspan(0, _BURST_S * 1000, color=GREY, alpha=0.2, linewidth=0)
    axis.set(xlabel="ms from a burst's begin", ylabel="ms to delivery", yscale="log")
    axis.set_xlim(0, 5 * _BURST_S * 1000)
    axis.legend(fontsize="small")
