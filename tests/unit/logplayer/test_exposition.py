"""The metrics of a player's process."""

from __future__ import annotations

from typing import Any

from logplayer.exposition import text


def task(target: str, owner: str, lag_s: float | None, p99: int | None) -> dict[str, Any]:
    return {
        "target": target, "partition": 2, "state": "playing", "owner": owner, "lag_s": lag_s,
        "delivered": 12, "retries": 3, "rejected": 1, "delay_us": {"p50": p99, "p99": p99},
    }  # fmt: skip


def test_the_metrics_of_a_process() -> None:
    tasks = [
        task("shop", "me", 0.5, 256),
        task("idle", "me", None, None),
        task("other", "you", 7.0, None),
    ]
    process = {"player": "orders", "owner": "me", "is_cut_off": False, "ring": {"bytes": 99}}
    lines = text({**process, "tasks": tasks}).splitlines()
    shop = 'player="orders",target="shop",partition="2"'
    for line in (
        f"ziplog_player_records_total{{{shop}}} 12",
        f"ziplog_player_retries_total{{{shop}}} 3",
        f"ziplog_player_rejected_total{{{shop}}} 1",
        f'ziplog_player_task_state{{{shop},state="playing"}} 1',
        f"ziplog_player_lag_seconds{{{shop}}} 0.5",
        f'ziplog_player_delay_seconds{{{shop},quantile="0.99"}} 0.000256',
        'ziplog_player_ring_bytes{player="orders"} 99',
        'ziplog_player_cut_off{player="orders"} 0',
    ):
        assert line in lines
    # State and lag of a task are its owner's; what this process has done for it is counted here.
    other = [line.split("{")[0] for line in lines if 'target="other"' in line]
    counters = ("records", "retries", "rejected")
    assert other == [f"ziplog_player_{name}_total" for name in counters]
    assert not [line for line in lines if 'lag_seconds{player="orders",target="idle"' in line]
