"""The calls of a client that change or describe the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ziplog.client import arguments, cursor_arguments, placement_arguments
from ziplog.client.async_base import AsyncConnection
from ziplog.client.common.requests import CursorsRequest, StatusRequest
from ziplog.types import RID_GENESIS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ziplog.types import CursorInfo, RecordId, RegionInfo


class AsyncAdministration(AsyncConnection):
    """Trims, cursors, changes of shards, upgrades, lost regions, and the cluster's status."""

    async def trim(
        self, rid: RecordId, *, force: bool = False, timeout: float | None = None
    ) -> None:
        """Delete all records before `rid`, once they are stable; the record of `rid` stays.

        This includes records that are inserted before it meanwhile (see `check_tail`).

        Args:
            rid: a position.
            force: delete also what cursors hold; these can be claimed again after `seek_cursor`.
            timeout: in seconds.

        Raises:
            TrimHeldError: a cursor needs records before `rid`; nothing was deleted.
            NoSuchRecordError: no shard owns the position `rid` yet.
            DeadlineError: it was not done in time; the call may be repeated. The text states what
                it waits for, and whether it will happen or may still happen.

        """
        await self._engine.call(arguments.trim(rid, self._deadline_ns(timeout), force=force))

    async def cursors(
        self, pattern: str = "*", *, timeout: float | None = None
    ) -> list[CursorInfo]:
        """Return the cursors whose names match a pattern of the shell, by name."""
        cursor_arguments.check_pattern(pattern)
        found = await self._engine.call(CursorsRequest(self._deadline_ns(timeout)))
        return cursor_arguments.matching(found, pattern)

    async def create_cursor(
        self,
        name: str,
        position: RecordId = RID_GENESIS,
        *,
        hold_s: int = 604_800,
        timeout: float | None = None,
    ) -> CursorInfo:
        """Create a cursor that no client owns; see `cursor` for the arguments.

        Raises:
            ConfigError: there is a cursor of this name.
            UnavailableError: there are 1,024 cursors already.

        """
        deadline_ns = self._deadline_ns(timeout)
        request = cursor_arguments.edit(name, "create", deadline_ns, position, hold_s)
        found: CursorInfo = await self._engine.call(request)
        return found

    async def seek_cursor(
        self, name: str, position: RecordId, *, timeout: float | None = None
    ) -> CursorInfo:
        """Set a cursor's position, forward or back; its owner loses it, its mark is cleared.

        Args:
            name: a cursor.
            position: RID_GENESIS: the first position that is not trimmed; RID_RECENT: behind the
                last record.
            timeout: in seconds.

        Raises:
            ConfigError: there is no such cursor.
            NoSuchRecordError: no shard owns the position yet.

        """
        request = cursor_arguments.edit(name, "seek", self._deadline_ns(timeout), position)
        found: CursorInfo = await self._engine.call(request)
        return found

    async def pause_cursor(
        self, name: str, at: RecordId | None = None, *, timeout: float | None = None
    ) -> CursorInfo:
        """Pause a cursor; its owner learns of it within a third of its lease, and keeps it.

        Args:
            name: a cursor.
            at: the owner goes on up to this position, exclusive; None: it pauses at once.
            timeout: in seconds.

        Raises:
            ConfigError: there is no such cursor.

        """
        deadline_ns = self._deadline_ns(timeout)
        request = cursor_arguments.edit(
            name, "pause", deadline_ns, RID_GENESIS if at is None else at
        )
        found: CursorInfo = await self._engine.call(request)
        return found

    async def resume_cursor(self, name: str, *, timeout: float | None = None) -> CursorInfo:
        """End a pause; errors are those of `pause_cursor`."""
        request = cursor_arguments.edit(name, "resume", self._deadline_ns(timeout))
        found: CursorInfo = await self._engine.call(request)
        return found

    async def release_cursor(self, name: str, *, timeout: float | None = None) -> CursorInfo:
        """Take a cursor from its owner, so that another client can claim it at once.

        Errors are those of `pause_cursor`.
        """
        request = cursor_arguments.edit(name, "release", self._deadline_ns(timeout))
        found: CursorInfo = await self._engine.call(request)
        return found

    async def delete_cursor(self, name: str, *, timeout: float | None = None) -> None:
        """Delete a cursor, if there is one of this name; its owner loses it."""
        request = cursor_arguments.edit(name, "delete", self._deadline_ns(timeout))
        await self._engine.call(request)

    async def add_shard(
        self,
        shard: int,
        replicas: Mapping[str, str],
        *,
        regions: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Add a shard; return when it accepts records (T 4.2.3).

        Its servers must be in the cluster file and run. This client uses the shard at once, other
        clients a second later; subscriptions include it without action. The call is idempotent.

        Args:
            shard: a number that no shard ever had.
            replicas: its f+1 servers, the primary first: name in the cluster file -> "host:port".
            regions: the region of each server that has one in the cluster file.
            timeout: in seconds.

        Raises:
            ConfigError: an argument is invalid; the number or a server is or was in use by another
                shard; the number of `replicas` differs from that of other shards; or they are in
                fewer regions than the cluster requires.
            DeadlineError: it was not live in time, see the error's text; the change continues.

        """
        await self._engine.call(
            placement_arguments.change(shard, "add", self._deadline_ns(timeout), replicas, regions)
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
        await self._engine.call(
            placement_arguments.change(shard, "remove", self._deadline_ns(timeout))
        )

    async def finalize_shard(self, shard: int, *, timeout: float | None = None) -> None:
        """Remove a shard, and wait until its records are on stable storage at all its servers.

        From then on, only `trim` changes it. Arguments and errors are those of `remove_shard`.
        """
        await self._engine.call(
            placement_arguments.change(shard, "finalize", self._deadline_ns(timeout))
        )

    async def cluster(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the status document."""
        document: bytes = await self._engine.call(StatusRequest(self._deadline_ns(timeout)))
        return arguments.status(document)

    async def regions(self, *, timeout: float | None = None) -> dict[str, RegionInfo]:
        """Return the regions of the cluster's nodes, with this client's measured latencies.

        Nodes without a region are in the region "".
        """
        document = await self.cluster(timeout=timeout)
        return placement_arguments.regions(document, self._core.insert_latency_ns)

    async def lose_region(self, name: str, *, timeout: float | None = None) -> None:
        """Give up a region, so that readers continue without its servers; idempotent.

        A shard with more than one server in lost regions then starts its next view with the
        servers that are left, even with one: each of them holds all acknowledged records. But if
        these servers fail, too, readers of the shard wait for them. The region counts again after
        `restore_region`, or once all its servers are back in service.

        Args:
            name: a region of storage servers; "": the servers without a region.
            timeout: in seconds.

        Raises:
            ConfigError: no storage server is in this region; the text lists the regions.
            UnavailableError: a server there was heard within the last 10 s; the text names it.

        """
        deadline_ns = self._deadline_ns(timeout)
        await self._engine.call(placement_arguments.change_region(name, deadline_ns, is_lost=True))

    async def restore_region(self, name: str, *, timeout: float | None = None) -> None:
        """Let a region count again; idempotent, also for a region that was not given up.

        Args:
            name: a region; "": the servers without a region.
            timeout: in seconds.

        Raises:
            ConfigError: no storage server is in this region; the text lists the regions.

        """
        deadline_ns = self._deadline_ns(timeout)
        await self._engine.call(placement_arguments.change_region(name, deadline_ns, is_lost=False))

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
