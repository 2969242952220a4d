"""`ziplog bench`: latency and throughput of a running cluster, as text, JSON or CSV."""

from __future__ import annotations

import contextlib
import secrets
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ziplog.bench import processes
from ziplog.bench.measured import Histogram
from ziplog.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Json, Timeout
from ziplog.cli.plugins import PluginGroup
from ziplog.cli.progress import bar
from ziplog.cli.terminal import print_json
from ziplog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ziplog.bench.measured import Measured

_MIN_TAIL_BYTES: Final = 16
#: The highest `max_payload_bytes` of a cluster.
_MAX_BYTES: Final = 8 * 1024 * 1024
_MAX_CLIENTS: Final = 256
_QUANTILES: Final = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999), ("max", 1.0))
_BAR: Final = 40

Size = Annotated[
    int,
    typer.Option(
        "--size", min=0, max=_MAX_BYTES, metavar="BYTES", help="Size of a record or value."
    ),
]
Clients = Annotated[
    int, typer.Option("--clients", min=1, max=_MAX_CLIENTS, help="Number of client processes.")
]
Seconds = Annotated[
    float, typer.Option("--seconds", min=0.1, max=86_400, help="Duration of the measurement.")
]
Csv = Annotated[bool, typer.Option("--csv", help="One line for each bucket of the histogram.")]


class _Benchmarks(PluginGroup):
    """Our benchmarks, and those of other packages."""

    entry_points = "ziplog.benchmarks"


app: Final = typer.Typer(
    cls=_Benchmarks,
    help="Measure a running cluster; the records stay in its log.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command()
def insert(
    size: Size = 100,
    clients: Clients = 1,
    seconds: Seconds = 10.0,
    *,
    csv: Csv = False,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Insert single records, each client one after the other; measure each insert."""
    address = ["--bootstrap", bootstrap, "--timeout", f"{timeout}"]
    arguments = ["insert", *address, "--size", f"{size}", "--seconds", f"{seconds}"]
    with progress(seconds) as on_progress:
        found = processes.run("ziplog.bench.client", arguments, clients, on_progress)
    print_results(found, {"clients": clients, "size_bytes": size}, csv=csv, json=json)


@app.command()
def tail(
    size: Size = 100,
    clients: Clients = 1,
    seconds: Seconds = 10.0,
    *,
    csv: Csv = False,
    json: Json = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 10.0,
) -> None:
    """Follow the log with each client, while one more client inserts single records.

    Measures the time from the begin of an insert to the delivery of its record.
    """
    if size < _MIN_TAIL_BYTES:
        raise ConfigError("--size", size, f"{_MIN_TAIL_BYTES} or more: a record carries its time")
    run = ["--run", f"{secrets.randbits(60)}"]
    address = ["--bootstrap", bootstrap, "--timeout", f"{timeout}"]
    # The inserting process is stopped when the last reader has ended.
    inserting = ("insert", *address, *run, "--size", f"{size}", "--seconds", "1e6")
    with progress(seconds) as on_progress:
        found = processes.run(
            "ziplog.bench.client", ["tail", *address, *run, "--seconds", f"{seconds}"],
            clients, on_progress, inserting,
        )  # fmt: skip
    print_results(found, {"clients": clients, "size_bytes": size}, csv=csv, json=json)


@contextlib.contextmanager
def progress(seconds: float) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on a terminal; it is advanced with the seconds since the start."""
    with bar("measuring", seconds) as advance:
        yield lambda passed: advance(min(passed, seconds))


def print_results(found: list[Measured], setting: dict[str, Any], *, csv: bool, json: bool) -> None:
    """Print measurements in the requested format.

    Args:
        found: the measurements of each operation.
        setting: what was measured, for the JSON document.
        csv: print the histogram as CSV.
        json: print one JSON document for each operation.

    """
    if csv:
        sys.stdout.write("operation,up_to_us,count\n")
    for measured in found:
        if csv:
            sys.stdout.write(_as_csv(measured))
        elif json:
            document = _as_document(measured, setting)
            print_json(document)
        else:
            sys.stdout.write(_as_text(measured))


def _as_csv(measured: Measured) -> str:
    return "".join(
        f"{measured.operation},{end / 1000:g},{count}\n"
        for end, count in Histogram(measured.counts).buckets()
    )


def _as_document(measured: Measured, setting: dict[str, Any]) -> dict[str, Any]:
    histogram = Histogram(measured.counts)
    units = measured.fast_path + measured.slow_path
    return {
        "operation": measured.operation,
        **setting,
        "seconds": round(measured.seconds, 3),
        "count": measured.count,
        "per_s": round(measured.rate, 1),
        "latency_us": {name: histogram.quantile(share) / 1000 for name, share in _QUANTILES},
        "fast_path_share": round(measured.fast_path / units, 4) if units else None,
        "histogram_us": [[end / 1000, count] for end, count in histogram.buckets()],
    }


def _as_text(measured: Measured) -> str:
    histogram = Histogram(measured.counts)
    latencies = (f"{name} {histogram.quantile(share) / 1000:,.0f}" for name, share in _QUANTILES)
    units = measured.fast_path + measured.slow_path
    path = f", fast path {measured.fast_path / units:.1%}" if units else ""
    rate = f"{measured.count:,} in {measured.seconds:.1f} s, {measured.rate:,.0f}/s"
    lines = [
        f"{measured.operation}: {rate}{path}",
        f"latency in us: {', '.join(latencies)}",
        *_bars(histogram),
    ]
    return "".join(f"{line}\n" for line in lines)


def _bars(histogram: Histogram) -> Iterator[str]:
    """Yield a line for each power of two between the least and the greatest latency."""
    octaves: dict[int, int] = {}
    for end, count in histogram.buckets():
        # A bucket's durations are below its end.
        octave = max((end - 1) // 1000, 1).bit_length()
        octaves[octave] = octaves.get(octave, 0) + count
    total = sum(octaves.values())
    for octave in range(min(octaves, default=0), max(octaves, default=-1) + 1):
        share = octaves.get(octave, 0) / total
        yield f"{1 << octave:>9,} us  {share:7.2%}  {'#' * round(share * _BAR)}".rstrip()
