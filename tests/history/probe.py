"""Health of a cluster: whether all nodes are up, and whether every shard accepts an insert.

The inserts of a `Probe` are in the history like those of any client.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import ziplog
from tests.history import events
from tests.history.clients import failed
from tests.history.events import now
from tests.history.payloads import PER_CLIENT, payload
from ziplog import ZiplogError
from ziplog.status_document import nodes_of

if TYPE_CHECKING:
    from typing import Self

    from tests.history.clients import LogPlan

#: The probe's number among the clients.
_NUMBER: Final = 999
_TIMEOUT_S: Final = 1.0
_POLL_S: Final = 0.02
#: No server answers.
_SILENT: Final = {"the membership service": "silent"}


class Health:
    """Requests the status document; connects with the first request."""

    def __init__(self, bootstrap: str) -> None:
        """Prepare; `bootstrap`: "host:port,..." of the membership service."""
        self._bootstrap: Final = bootstrap
        self._log: ziplog.Log | None = None

    def __enter__(self) -> Self:
        """Do nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the client."""
        self.close()

    def close(self) -> None:
        """Close the client. Idempotent."""
        if self._log is not None:
            self._log.close()
            self._log = None

    def _connected(self) -> ziplog.Log:
        self._log = self._log or ziplog.connect(self._bootstrap, timeout=_TIMEOUT_S)
        return self._log

    def status(self) -> dict[str, Any] | None:
        """Return the status document; None if no server answers."""
        try:
            return self._connected().cluster()
        except ZiplogError:
            return None

    def unhealthy(self) -> dict[str, str]:
        """Return the unhealthy nodes and shards ("shard 0") with their states."""
        status = self.status()
        return _SILENT if status is None else _unhealthy_in(status)

    def refusing(self) -> dict[str, str]:
        """Return the shards that accept no insert; here none is tried."""
        return {}

    def wait_healthy(self, timeout_s: float) -> float:
        """Wait until all nodes are up and no shard is `refusing`; return the seconds.

        Raises:
            TimeoutError: the deadline passed; the message lists what is unhealthy.

        """
        began = time.monotonic()
        missing: dict[str, str] = {}
        while time.monotonic() < began + timeout_s:
            missing = self.unhealthy() or self.refusing()
            if not missing:
                return time.monotonic() - began
            time.sleep(_POLL_S)
        raise TimeoutError(f"not whole after {timeout_s:g} s: {missing}")

    def leader(self, group: str) -> str | None:
        """Return the leader's name among "mms" or "failure_handlers"; None if it is not known."""
        for node in (self.status() or {}).get(group, ()):
            if node.get("leader") and node["state"] == "up":
                return str(node["name"])
        return None


class Probe(Health):
    """Also inserts, one record at a time."""

    def __init__(self, plan: LogPlan) -> None:
        """Begin the probe's history."""
        super().__init__(plan.bootstrap)
        self._payload_bytes: Final = plan.payload_bytes
        self._recorder: Final = plan.recorder("probe")
        self._next = _NUMBER * PER_CLIENT

    def close(self) -> None:
        """Close the client and its history. Idempotent."""
        super().close()
        self._recorder.close()

    def insert(self, shard: int) -> None:
        """Insert a record at a shard.

        Raises:
            ZiplogError: the insert failed, or its outcome is unknown.

        """
        log = self._connected()
        log.set_policy(ziplog.policy.pin(shard))
        self._next += 1
        op = self._recorder.next_op()
        self._recorder.call(events.Insert(op, now(), 0, [self._next]))
        try:
            rid = log.insert_after(payload(self._next, self._payload_bytes))
        except ZiplogError as error:
            self._recorder.result(failed(op, error))
            raise
        self._recorder.result(events.Inserted(op, now(), [rid.gsn], [rid.shard]))

    def refusing(self) -> dict[str, str]:
        """Return the shards that accept no insert, with the errors."""
        status, refusing = self.status(), {}
        if status is None:
            return _SILENT
        for shard in status["shards"]:
            try:
                self.insert(shard["id"])
            except ZiplogError as error:
                refusing[f"shard {shard['id']}"] = f"takes no insert: {error}"
        return refusing


def _unhealthy_in(status: dict[str, Any]) -> dict[str, str]:
    """Return the nodes and shards of a status document that are not as they should be."""
    found = {n["name"]: n["state"] for n in nodes_of(status) if n["state"] != "up"}
    for shard in status["shards"]:
        if shard["state"] != "live":
            found[f"shard {shard['id']}"] = shard["state"]
    return found
