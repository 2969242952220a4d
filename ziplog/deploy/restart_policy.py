"""Restart policy of a supervisor: when it restarts dead nodes and kills unreachable ones.

A dead node is restarted after a short pause, which doubles while it keeps dying. A running node
that the failure handler continuously reports as unreachable for 2 s is killed and restarted. With
each kill the next process gets more time from its start, until the node was reachable for a while:
on a busy machine a kill makes it slower to recover. Rule: decisions only; time is an argument.

Invariant: time without a reply of the failure handler does not count against a node. See
docs/protocol.md, section 11 (joining).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from ziplog.core.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

#: Pause between a death and the restart; doubles up to the maximum.
FIRST_PAUSE_NS: Final = NS_PER_S // 5
MAX_PAUSE_NS: Final = 10 * NS_PER_S
#: Lifetime after which a death no longer counts as part of a crash loop; and time for which a node
#: is reachable after which earlier kills no longer count.
STABLE_NS: Final = 30 * NS_PER_S
#: Time for which a running node may be unreachable, and minimum time from its start, before it is
#: killed.
UNREACHABLE_NS: Final = 2 * NS_PER_S
MIN_START_NS: Final = 4 * NS_PER_S
#: Minimum time from the start of a node that was killed before; doubles up to the maximum.
FIRST_GRACE_NS: Final = 10 * NS_PER_S
MAX_GRACE_NS: Final = 160 * NS_PER_S
#: Gap between replies after which every unreachable node counts as newly unreachable.
MAX_GAP_NS: Final = NS_PER_S


class Process(msgspec.Struct, frozen=True):
    """A node's process, as the supervisor sees it."""

    #: When it was started, in monotonic nanoseconds.
    started: int
    is_dead: bool


class Death(msgspec.Struct, frozen=True):
    """Event: a node died, and will be restarted."""

    node: str
    pause_ns: int


class Start(msgspec.Struct, frozen=True):
    """Order to start this dead node now."""

    node: str


class _Node(msgspec.Struct):
    """The history of a node."""

    #: When it is to be restarted; None: it runs, as far as is known.
    restart_at: int | None = None
    #: Pause between its next death and the restart.
    restart_pause: int = FIRST_PAUSE_NS
    #: Since when the failure handler reports it as unreachable, continuously; None: it does not.
    unreachable_since: int | None = None
    #: When it was reported last.
    last_unreachable_at: int = 0
    #: Minimum time from its start, and from its last kill, before it is killed.
    grace: int = MIN_START_NS
    #: When it was killed last, or long ago. A process whose disk hangs ends later.
    killed_at: int = -(2**62)


class RestartPolicy:
    """Restart policy for the nodes of one machine. All times are monotonic nanoseconds."""

    def __init__(self) -> None:
        """Know no node yet."""
        self._nodes: Final[dict[str, _Node]] = {}
        #: When the failure handler replied last; None: never.
        self._replied_at: int | None = None

    @property
    def has_failures(self) -> bool:
        """Whether some node is dead or unreachable."""
        return any(
            node.restart_at is not None or node.unreachable_since is not None
            for node in self._nodes.values()
        )

    def check_processes(self, processes: Mapping[str, Process], now: int) -> list[Death | Start]:
        """Compare the processes with the last call; return the new deaths and the due restarts."""
        found: list[Death | Start] = []
        for name, process in processes.items():
            node = self._nodes.setdefault(name, _Node())
            if not process.is_dead:
                node.restart_at = None
            elif node.restart_at is None:
                if now - process.started >= STABLE_NS:
                    node.restart_pause = FIRST_PAUSE_NS
                found.append(Death(name, node.restart_pause))
                node.restart_at = now + node.restart_pause
                node.restart_pause = min(2 * node.restart_pause, MAX_PAUSE_NS)
            elif now >= node.restart_at:
                found.append(Start(name))
                # If the start fails, it counts as another death.
                node.restart_at = None
        return found

    def on_unreachable(
        self, names: Collection[str], processes: Mapping[str, Process], now: int
    ) -> list[str]:
        """Handle the failure handler's reply.

        Args:
            names: the unreachable nodes, of any machine.
            processes: the nodes of this machine.
            now: monotonic nanoseconds.

        Returns:
            The running nodes to kill and restart now.

        """
        had_gap = self._replied_at is None or now - self._replied_at > MAX_GAP_NS
        self._replied_at = now
        due = []
        for name, process in processes.items():
            node = self._nodes.setdefault(name, _Node())
            if name not in names:
                node.unreachable_since = None
                if now - node.last_unreachable_at >= STABLE_NS:
                    node.grace = MIN_START_NS
                continue
            node.last_unreachable_at = now
            if had_gap or node.unreachable_since is None:
                node.unreachable_since = now
            began = max(process.started, node.killed_at)
            due_at = max(node.unreachable_since + UNREACHABLE_NS, began + node.grace)
            if not process.is_dead and now >= due_at:
                node.killed_at = now
                node.grace = max(FIRST_GRACE_NS, min(2 * node.grace, MAX_GRACE_NS))
                due.append(name)
        return due
