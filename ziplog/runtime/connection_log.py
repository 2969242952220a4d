"""The connections of a process to other nodes, at log level `debug`."""

from __future__ import annotations

import structlog


class ConnectionLog(dict[bytes, str]):
    """The `changes` of a transport, which also logs them.

    It has the last change of each connection, so a peer that stays down causes one line.
    """

    def __setitem__(self, name: bytes, problem: str) -> None:
        """Log a change, unless it is the last one again."""
        if self.get(name) != problem:
            log, peer = structlog.get_logger(), name.decode(errors="replace")
            if problem:
                log.debug("peer disconnected", peer=peer, reason=problem)
            else:
                log.debug("peer connected", peer=peer)
        super().__setitem__(name, problem)
