"""The picture of delivery latency: distributions, no-ops, steps of a rate, bursts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from metrics.picture import axes

from log_bench.sequential import BURST_S, EPOCH_MS

if TYPE_CHECKING:
    from pathlib import Path

Figures = dict[str, Any]


def draw(result: Figures, path: Path) -> None:
    """Draw the distributions, the steps and the bursts."""
    with axes(path, 2, 2, (11, 7.6)) as found:
        _draw_distributions(found[0][0], result["pauses"], result["no_ops"])
        _draw_no_ops(found[0][1], result["no_ops"])
        _draw_steps(found[1][0], result["steps"])
        _draw_bursts(found[1][1], result["bursts"])


def _loops(result: Figures) -> dict[str, Figures]:
    return {name: of for name, of in result.items() if name.startswith("T = ")}


def _draw_distributions(axis: Any, result: Figures, long: Figures) -> None:
    for of, line, epoch_ms in ((result, "-", EPOCH_MS), (long, "--", long["epoch_ms"])):
        for name, loop in _loops(of).items():
            points = zip(*loop["windows"]["delivery_ms"], strict=True)
            colour = f"C{list(_loops(result)).index(name)}"
            axis.plot(*points, line, color=colour, label=f"{name}, epochs of {epoch_ms} ms")
    axis.set_xscale("log")
    axis.set_xlabel("ms from insert to delivery")
    axis.set_ylabel("share of the records")
    axis.set_title(f"pauses U(0, 2T), {result['shards']} x {result['per_s_and_shard']}/s")
    axis.legend(fontsize="small")


def _draw_no_ops(axis: Any, result: Figures) -> None:
    rows = {
        "within epochs": "entries_within_epochs_per_s",
        "ends of epochs": "entries_at_ends_per_s",
        "thesis:\nat once": "thesis_entries_timeout_0_per_s",
        "thesis: after\na mean gap": "thesis_entries_timeout_mean_gap_per_s",
    }
    loops = _loops(result)
    width = 0.8 / len(loops)
    for index, (name, of) in enumerate(loops.items()):
        at = [place + index * width for place in range(len(rows))]
        axis.bar(at, [of[key] for key in rows.values()], width, label=name)
    axis.set_xticks([place + 0.2 for place in range(len(rows))], list(rows), fontsize="small")
    axis.set_ylabel("no-op entries a second and shard")
    axis.set_title(f"{result['per_s_and_shard']} inserts/s, epochs of {result['epoch_ms']} ms")
    axis.legend()


def _draw_steps(axis: Any, result: Figures) -> None:
    windows = result["windows"]
    for name, colour in (("other shards", "#bbbbbb"), ("the shard", "#2a6f97")):
        at = [(index + 0.5) * windows["width_s"] for index in range(len(windows[name]))]
        axis.plot(
            at, [math.nan if v is None else v for v in windows[name]], color=colour, label=name
        )
    for change in result["changes"]:
        axis.axvline(change["at_s"], color="#888888", linestyle=":")
        axis.annotate(
            f"x{change['to']:g}", (change["at_s"], 1), xycoords=("data", "axes fraction"),
            xytext=(2, -10), textcoords="offset points", fontsize="small",
        )  # fmt: skip
        if change["weights_after_ms"] is not None:
            stop = change["at_s"] + change["weights_after_ms"] / 1000
            axis.axvspan(change["at_s"], stop, color="#c58b2b", alpha=0.4, linewidth=0)
    axis.set_ylim(0, None)
    axis.set_xlabel("seconds (shaded: until the new weights are in force)")
    axis.set_ylabel("ms to delivery, p50")
    axis.legend()


def _draw_bursts(axis: Any, result: Figures) -> None:
    for name, colour in (("no lag-fix", "#c58b2b"), ("lag-fix", "#2a6f97")):
        windows = result[name]["windows"]
        for percent, line in ((50, "-"), (99, ":")):
            row = windows[f"p{percent}_ms"]
            at = [(index + 0.5) * windows["width_s"] * 1000 for index in range(len(row))]
            row = [math.nan if value is None else value for value in row]
            axis.plot(at, row, line, color=colour, label=f"{name}, p{percent}")
    axis.axvspan(0, BURST_S * 1000, color="#888888", alpha=0.2, linewidth=0)
    axis.set_xlim(0, 5 * BURST_S * 1000)
    axis.set_yscale("log")
    axis.set_xlabel("ms from a burst's begin")
    axis.set_ylabel("ms to delivery")
    axis.legend(fontsize="small")
