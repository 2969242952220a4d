"""The connections of a process to other nodes, at log level `debug`."""

from __future__ import annotations

from ziplog import event_log


class ConnectionLog(dict[bytes, str]):
    """The `changes` of a transport, which also logs them.

    It has the last change of each connection, so a peer that stays down causes one line.
    """

    def __setitem__(self, name: bytes, problem: str) -> None:
        """Log a change, unless it is the last one again."""
        if self.get(name) != problem:
            peer = name.decode(errors="replace")
            if problem:
                event_log.debug("peer disconnected", peer=peer, reason=problem)
            else:
                event_log.debug("peer connected", peer=peer)
        super().__setitem__(name, problem)
