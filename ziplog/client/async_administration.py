"""The calls of a client that change or describe the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ziplog.client import arguments
from ziplog.client.async_base import AsyncConnection
from ziplog.client.common.requests import StatusRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ziplog.types import RecordId


class AsyncAdministration(AsyncConnection):
    """Trims, changes of shards, upgrades, and the cluster's status."""

    async def trim(self, rid: RecordId, *, timeout: float | None = None) -> None:
        """Delete all records before `rid`, once they are stable; the record of `rid` stays.

        This includes records that are inserted before it meanwhile (see `check_tail`).

        Raises:
            NoSuchRecordError: no shard owns the position `rid` yet.
            DeadlineError: it was not done in time; the call may be repeated. The text states what
                it waits for, and whether it will happen or may still happen.

        """
        await self._engine.call(arguments.trim(rid, self._deadline_ns(timeout)))

    async def add_shard(
        self, shard: int, replicas: Mapping[str, str], *, timeout: float | None = None
    ) -> None:
        """Add a shard; return when it accepts records (T 4.2.3).

        Its servers must be in the cluster file and run. This client uses the shard at once, other
        clients a second later; subscriptions include it without action. The call is idempotent.

        Args:
            shard: a number that no shard ever had.
            replicas: its f+1 servers, the primary first: name in the cluster file -> "host:port".
            timeout: in seconds.

        Raises:
            ConfigError: an argument is invalid; the number or a server is or was in use by another
                shard; or the number of `replicas` differs from that of other shards.
            DeadlineError: it was not live in time, see the error's text; the change continues.

        """
        await self._engine.call(
            arguments.change(shard, "add", self._deadline_ns(timeout), replicas)
        )

    async def remove_shard(self, shard: int, *, timeout: float | None = None) -> None:
        """Remove a shard permanently; return when it gets no more positions (T 4.2.3).

        Its records stay there and can be read, so its servers must continue to run. Inserts go to
        other shards, including pending ones; only inserts that are pinned to this shard fail. Its
        number is never used again.

        Args:
            shard: a shard that is live, parked, joining or recovering.
            timeout: in seconds.

        Raises:
            ConfigError: there is no such shard, or it is the last one that accepts records.
            DeadlineError: it was not removed in time, see the error's text; the change continues.

        """
        await self._engine.call(arguments.change(shard, "remove", self._deadline_ns(timeout)))

    async def finalize_shard(self, shard: int, *, timeout: float | None = None) -> None:
        """Remove a shard, and wait until its records are on stable storage at all its servers.

        From then on, only `trim` changes it. Arguments and errors are those of `remove_shard`.
        """
        await self._engine.call(arguments.change(shard, "finalize", self._deadline_ns(timeout)))

    async def cluster(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the status document."""
        document: bytes = await self._engine.call(StatusRequest(self._deadline_ns(timeout)))
        return arguments.status(document)

    async def finish_upgrade(self, wire: int, *, timeout: float | None = None) -> int:
        """Have the cluster use a wire version; return the version that it uses then.

        From then on, a release that does not know this version cannot be started again.

        Args:
            wire: the last one in `wire_versions` of every node in the status document.
            timeout: in seconds.

        Raises:
            UnavailableError: a node is down or does not know the version; the text names it.

        """
        request = arguments.finish_upgrade(wire, self._deadline_ns(timeout))
        found: int = await self._engine.call(request)
        return found

    async def events(self, *, after: int = 0, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return recorded events of the cluster, oldest first: recoveries, shards, trims, nodes.

        Args:
            after: the number of an event; only later ones are returned. The service keeps the
                latest 500 events.
            timeout: in seconds.

        Returns:
            For each event: `number`, `at_us` (Unix time in microseconds, by the clock of the
            service's leader), `kind`, `shard`, `node` (None: none) and `text`.

        """
        number = arguments.count("after", after)
        request = StatusRequest(self._deadline_ns(timeout), "events", number)
        return arguments.history(await self._engine.call(request), "events")

    async def epochs(
        self, start: int, stop: int, *, timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """Return epochs of [start, stop), as far as they are leased and not trimmed; at most 1000.

        Returns:
            For each epoch: its number `epoch`, its `lease`, its length in `milliseconds`, its
            positions [`start`, `stop`), and its `shards`, each with `view`, `weight` and `state`:
            final, if all its positions in the epoch are decided and stable, or open.

        """
        first, end = arguments.count("start", start), arguments.count("stop", stop)
        request = StatusRequest(self._deadline_ns(timeout), "epochs", first, end)
        return arguments.history(await self._engine.call(request), "epochs")
