"""The metrics of a player's process, in Prometheus' text format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ziplog.monitor.exposition import TEXT, Family, render

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ziplog.monitor.exposition import Labels, Sample

_US_PER_S: Final = 1_000_000
#: The counters of a task: the key in the status, the metric and its help text.
_COUNTERS: Final = (
    ("delivered", "ziplog_player_records_total", "Records that the target has acknowledged."),
    ("retries", "ziplog_player_retries_total", "Steps that were tried again."),
    ("rejected", "ziplog_player_rejected_total", "Records that the target will never accept."),
)


def text(status: dict[str, Any]) -> str:
    """Return the metrics of a status document (`logplayer.status`)."""
    return render(_families(status), TEXT)


def _families(status: dict[str, Any]) -> Iterator[Family]:
    player: Labels = {"player": status["player"]}
    tasks: list[tuple[Labels, dict[str, Any]]] = [
        (player | {"target": task["target"], "partition": task["partition"]}, task)
        for task in status["tasks"]
    ]
    for key, name, words in _COUNTERS:
        samples: list[Sample] = [(labels, task[key]) for labels, task in tasks]
        yield Family(name, "counter", words, samples)
    here = [(labels, task) for labels, task in tasks if task["owner"] == status["owner"]]
    yield Family(
        "ziplog_player_task_state", "gauge", "1; the state of a task that this process owns.",
        [(labels | {"state": task["state"]}, 1) for labels, task in here],
    )  # fmt: skip
    yield Family(
        "ziplog_player_lag_seconds", "gauge",
        "Age of the first record that the task has not delivered; none: it is not known.",
        [(labels, task["lag_s"]) for labels, task in here if task["lag_s"] is not None],
    )  # fmt: skip
    yield Family(
        "ziplog_player_delay_seconds", "gauge",
        "From the receipt of a record to the target's acknowledgement: upper bounds of quantiles"
        " since the process started.",
        [
            (labels | {"quantile": f"0.{percent}"}, task["delay_us"][f"p{percent}"] / _US_PER_S)
            for labels, task in tasks
            for percent in (50, 99)
            if task["delay_us"][f"p{percent}"] is not None
        ],
    )  # fmt: skip
    yield Family(
        "ziplog_player_ring_bytes", "gauge", "Bytes of the records in the ring.",
        [(player, status["ring"]["bytes"])],
    )  # fmt: skip
    yield Family(
        "ziplog_player_cut_off", "gauge",
        "Whether the membership service was silent for a lease, so that no step begins.",
        [(player, status["is_cut_off"])],
    )  # fmt: skip
