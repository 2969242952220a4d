"""The status of a coordinator as lines for people, in groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


def lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a status document (docs/logdb.md, section 16)."""
    behind = max(document["tail"] - document["passed"], 0)
    state = "ready" if document["ready"] else "not ready, it replays the log"
    yield f"coordinator {document['endpoint']}: {state}, {_count(behind)} positions behind"
    yield ""
    yield _row(
        "data", f"{_count(document['keys'])} keys", f"{_count(document['data_bytes'])} bytes"
    )
    yield _row(
        "decided", f"{_count(document['commits'])} commits", f"{_count(document['aborts'])} aborts"
    )
    yield _row(
        "log",
        f"begins at {document['trimmed']}",
        f"applied up to {document['position']}",
        f"{_count(document['records'])} records",
    )
    yield _row(
        "",
        f"{_count(document['log_bytes'])} bytes since the last trim",
        f"{_count(document['moving_bytes'])} live",
        f"{_count(document['dead_bytes'])} dead",
    )
    yield _row("checkpoint", *_checkpoint(document))
    yield _row("cleaner", *_cleaner(document["cleaner"]))
    yield _row(
        "clients",
        f"{_count(document['sessions'])} sessions",
        f"{_count(document['waiting'])} waiting requests",
        f"{_count(document['snapshots'])} snapshots",
    )
    yield _row(
        "cache",
        f"{_count(document['cached_values'])} values",
        f"{_count(document['cache_bytes'])} bytes",
    )
    yield from _warnings(document)


def _checkpoint(document: dict[str, Any]) -> Iterator[str]:
    last = document["last_checkpoint"]
    yield f"last at {last}" if last else "none yet"
    yield f"{_count(document['since_checkpoint'])} records since"
    if not document["checkpoints"]:
        yield "this coordinator makes none"


def _cleaner(cleaner: dict[str, Any]) -> Iterator[str]:
    yield f"{_count(cleaner['rounds'])} rounds"
    yield f"{_count(cleaner['moved_bytes'])} bytes moved"
    if cleaner["failed"]:
        yield f"{_count(cleaner['failed'])} failed ({cleaner['reason'] or 'no reason given'})"


def _warnings(document: dict[str, Any]) -> Iterator[str]:
    notes = []
    if document["first_unreadable"]:
        notes.append(f"an unreadable record at {document['first_unreadable']} stops the cleaner")
    if document["first_foreign"]:
        notes.append(f"the first record of another program is at {document['first_foreign']}")
    if document["starts"] > 1:
        notes.append(f"the tail of the log was started {document['starts']} times")
    if notes:
        yield ""
        yield from notes


def _row(name: str, *parts: str) -> str:
    return f"{name:<11} {', '.join(parts)}"


def _count(number: int) -> str:
    return f"{number:,}"
