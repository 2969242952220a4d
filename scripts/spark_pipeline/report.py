"""Report of the pipeline, as text, as figures and as a picture."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from metrics.picture import BLUE, GREEN, LIGHT_GREY, OCHRE, RED, axes

from spark_pipeline.answers import LATE_MINUTES, Anomaly, Delays, LostLegs, Session

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from spark_pipeline.answers import Rows
    from spark_pipeline.run import Outcome

#: Hours of the day that have flights.
_HOURS: Final = range(5, 24)
#: Rows of the longer tables.
_FIRST: Final = 6
#: Carriers that the picture names.
_NAMED: Final = ("EV", "UA", "DL", "US")
_COLOURS: Final = (RED, BLUE, OCHRE, GREEN)


def lines(outcome: Outcome) -> Iterator[str]:
    """Yield the lines of the output."""
    plan, answers = outcome.plan, outcome.answers
    rate = plan.events / outcome.insert_s
    yield (
        f"{plan.events:,} events ({outcome.payload_bytes / 1e6:.0f} MB) from {plan.clients} clients"
        f" into {plan.shards} shards, f={plan.f}: {outcome.insert_s:.1f} s, {rate:,.0f}/s"
    )
    yield from _delays(answers["delays"].rows)
    yield from _sessions(answers["sessions"].rows)
    yield from _lost_legs(answers["lost_legs"].rows)
    yield from _anomalies(answers["anomalies"].rows)
    yield ""
    yield f"{'answer':<12}{'rows':>9}{'Spark':>9}{'Python':>9}"
    for name, of in answers.items():
        times = f"{of.spark_s:>7.1f} s{of.python_s:>7.1f} s"
        yield f"{name:<12}{len(of.rows):>9,}{times}  {of.fault or 'equal'}"
    streamed = outcome.streamed
    last = streamed.steps[-1][1]
    yield (
        f"stream: killed within micro-batch {streamed.killed.batch} of {len(streamed.steps)},"
        f" went on to {last:,} events: {streamed.fault or 'equal'}"
    )
    yield "equal" if outcome.is_equal else "NOT EQUAL"


def _delays(rows: Rows) -> Iterator[str]:
    delays = [Delays(*row) for row in rows]
    departed: Counter[str] = Counter()
    for of in delays:
        departed[of.carrier] += of.departed
    yield ""
    yield "minutes late on average, by carrier and planned hour of departure (New York)"
    yield f"{'':<4}{'flights':>8}{'late':>6}" + "".join(f"{hour:>4}" for hour in _HOURS)
    for carrier, flights in departed.most_common():
        own = [of for of in delays if of.carrier == carrier]
        yield _row(carrier, flights, own)
    yield _row("all", departed.total(), delays)
    yield f"late: % that left more than {LATE_MINUTES} minutes late"


def _row(name: str, flights: int, own: list[Delays]) -> str:
    means = mean_by_hour(own)
    cells = "".join(f"{means[hour]:>4.0f}" if hour in means else f"{'·':>4}" for hour in _HOURS)
    return f"{name:<4}{flights:>8,}{100 * sum(of.late for of in own) / flights:>5.0f}%{cells}"


def mean_by_hour(delays: Iterable[Delays]) -> dict[int, float]:
    """Return the mean delay by hour of the day, over all carriers that are given."""
    minutes: defaultdict[int, int] = defaultdict(int)
    departed: Counter[int] = Counter()
    for of in delays:
        minutes[of.hour] += of.minutes
        departed[of.hour] += of.departed
    return {hour: minutes[hour] / count for hour, count in sorted(departed.items())}


def _sessions(rows: Rows) -> Iterator[str]:
    sessions = [Session(*row) for row in rows]
    flown = [of for of in sessions if of.departures]
    longest = max(sessions, key=lambda of: of.ends - of.begins)
    took = statistics.median(of.ends - of.begins for of in flown) if flown else 0
    begins = datetime.fromtimestamp(60 * longest.begins, UTC)
    yield ""
    yield (
        f"{len(sessions):,} sessions of {len({of.aircraft for of in sessions}):,} aircraft;"
        f" those with a departure take {took / 60:.1f} h (median)"
    )
    yield (
        f"the longest: {longest.aircraft}, {(longest.ends - longest.begins) / 60:.0f} h from"
        f" {begins:%Y-%m-%d}, {longest.departures} departures"
    )


def _lost_legs(rows: Rows) -> Iterator[str]:
    lost = sorted((LostLegs(*row) for row in rows), key=lambda of: (-of.times, of))
    yield ""
    yield f"{sum(of.times for of in lost):,} legs are not in the data; the most frequent:"
    most = (f"{of.arrived}-{of.departed} {of.times:,}" for of in lost[:_FIRST])
    yield "  " + ", ".join(most)


def _anomalies(rows: Rows) -> Iterator[str]:
    kinds = Counter(Anomaly(*row).kind for row in rows)
    yield ""
    yield "by the order of the log:"
    for kind, text in (
        ("late", "events came after a later one of their aircraft"),
        ("no arrival", "departures of an aircraft that has not arrived"),
        ("no departure", "arrivals of an aircraft that has not departed with this flight"),
    ):
        yield f"  {kinds[kind]:>7,} {text}"


def figures(outcome: Outcome) -> dict[str, Any]:
    """Return the figures for the JSON file."""
    began = outcome.streamed.began[0]
    delays = [Delays(*row) for row in outcome.answers["delays"].rows]
    return {
        "plan": outcome.plan._asdict(),
        "payload_bytes": outcome.payload_bytes,
        "insert_s": outcome.insert_s,
        "answers": {
            name: {
                "rows": len(of.rows),
                "spark_s": of.spark_s,
                "python_s": of.python_s,
                "equal": not of.fault,
            }
            for name, of in outcome.answers.items()
        },
        "stream": {
            "killed_in": outcome.streamed.killed.batch,
            "killed_s": outcome.streamed.killed.at - began,
            "again_s": outcome.streamed.began[1] - began,
            "steps": [[at - began, events] for at, events in outcome.streamed.steps],
            "equal": not outcome.streamed.fault,
        },
        "mean_delay": {
            carrier: mean_by_hour(of for of in delays if of.carrier == carrier)
            for carrier in sorted({of.carrier for of in delays})
        }
        | {"all": mean_by_hour(delays)},
    }


def as_json(outcome: Outcome) -> str:
    """Return the figures as a JSON document."""
    return json.dumps(figures(outcome), indent=1) + "\n"


def draw(outcome: Outcome, path: Path) -> None:
    """Draw the delays over the day, and the stream over time."""
    found = figures(outcome)
    with axes(path) as (left, right):
        _draw_delays(found["mean_delay"], left)
        _draw_stream(found["stream"], right)


def _draw_delays(means: dict[str, dict[int, float]], axis: Any) -> None:
    for carrier, mean in means.items():
        if carrier not in {*_NAMED, "all"}:
            axis.plot(mean.keys(), mean.values(), color=LIGHT_GREY, linewidth=1)
    for carrier, colour in zip(_NAMED, _COLOURS, strict=True):
        if of := means.get(carrier):
            axis.plot(of.keys(), of.values(), color=colour, label=carrier)
    axis.plot(means["all"].keys(), means["all"].values(), "k", linewidth=2.5, label="all")
    axis.set(xlabel="planned hour of departure, New York", ylabel="minutes late on average")
    axis.set(xlim=(_HOURS[0], _HOURS[-1]), ylim=(-10, 60))
    axis.legend()


def _draw_stream(stream: dict[str, Any], axis: Any) -> None:
    before = [step for step in stream["steps"] if step[0] < stream["killed_s"]]
    after = stream["steps"][len(before) :]
    axis.plot(*zip(*before, strict=True), "o-", color=BLUE, label="first process")
    axis.plot(*zip(*after, strict=True), "o-", color=OCHRE, label="from the checkpoint")
    axis.axvline(stream["killed_s"], color=RED, linestyle="--", label="SIGKILL")
    axis.set(xlabel="seconds since the stream's first start", ylabel="events in the answer")
    axis.set(xlim=(0, None), ylim=(0, None))
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.legend()
