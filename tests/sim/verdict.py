"""Holds a run against what was promised: while it goes on, and at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ziplog import wire
from ziplog.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sim.cluster import SimCluster
    from tests.sim.history import History
    from ziplog.sim.kernel import Kernel
    from ziplog.types import Record


class Monitor:
    """Looks at the servers again and again: what was stable once stays as it is."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster: Final = cluster

    def look(self) -> None:
        """Look at every server that runs."""


def final(cluster: SimCluster, history: History, _monitor: Monitor, _records: list[Record]) -> None:
    """Judge a run that is over: everything is whole, and every call has ended."""
    losses = [(loss.shard, loss.start, loss.stop) for loss in cluster.state.losses]
    history.losses(cluster.kernel.now, losses)
    history.check(allow_loss=bool(losses))


def teller(kernel: Kernel) -> Callable[[str, str, bytes], None]:
    """Return what puts every frame into a trace that is read."""

    def tell(src: str, dst: str, frame: bytes) -> None:
        try:
            message: Any = wire.decode(frame)
        except ProtocolError:
            message = f"{len(frame)} bytes that are no message"
        kernel.tell(f"{src} > {dst}: {str(message)[:300]}")

    return tell
