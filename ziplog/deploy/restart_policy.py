"""When a supervisor starts a node again: once it is dead, or once nobody can reach it.

A dead node comes back after a short pause, which doubles while it keeps dying. A node that runs and
that the failure handler names as unreachable, without a break, for 2 s, is killed and started; one
that was started meanwhile gets more time, and more with each kill. Rule: decides only; time is an
argument. Invariant: time without an answer of the failure handler accuses nobody.
See docs/protocol.md, section 11 (joining).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_S: Final = 1_000_000_000
#: From the moment when a process was seen dead to the next one; doubles up to the last.
FIRST_PAUSE_NS: Final = _S // 5
MAX_PAUSE_NS: Final = 10 * _S
#: A process that lived for so long is in no crash loop.
STABLE_NS: Final = 30 * _S
#: A process that runs and was named as unreachable may take so long to be reached, and in any case
#: so long from its start ...
UNREACHABLE_NS: Final = 2 * _S
MIN_START_NS: Final = 4 * _S
#: ... and one that was started since it was named, so long from its start; doubles up to the last.
FIRST_GRACE_NS: Final = 10 * _S
MAX_GRACE_NS: Final = 160 * _S
#: After so long without an answer, who is named now is named for the first time.
MAX_GAP_NS: Final = _S


class Process(msgspec.Struct, frozen=True):
    """What is known of a node's process."""

    #: When it was started, in monotonic nanoseconds.
    started: int
    is_dead: bool


class Death(msgspec.Struct, frozen=True):
    """A node was seen dead, and will be started again."""

    node: str
    pause_ns: int


class Start(msgspec.Struct, frozen=True):
    """Start this dead node now."""

    node: str


class _Node(msgspec.Struct):
    """What is remembered of a node."""

    #: When it is to be started again; None: it lives, as far as is known.
    restart_at: int | None = None
    #: From its next death to its next start.
    restart_pause: int = FIRST_PAUSE_NS
    #: Since when the failure handler names it without a break; None: it does not.
    named_since: int | None = None
    grace: int = FIRST_GRACE_NS


class RestartPolicy:
    """The nodes of one machine. All times are monotonic nanoseconds."""

    def __init__(self) -> None:
        self._nodes: Final[dict[str, _Node]] = {}
        self._answered: int | None = None

    @property
    def has_failures(self) -> bool:
        """Whether some node is dead or cannot be reached."""
        return any(
            node.restart_at is not None or node.named_since is not None
            for node in self._nodes.values()
        )

    def check_processes(self, processes: Mapping[str, Process], now: int) -> list[Death | Start]:
        """Take what the processes are now; return who has died and who is to be started."""
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
                # Should the start fail, this is another death.
                node.restart_at = None
        return found

    def on_unreachable(
        self, names: Collection[str], processes: Mapping[str, Process], now: int
    ) -> list[str]:
        """Take the failure handler's answer.

        Args:
            names: the nodes that it waits for, of any machine.
            processes: the nodes of this machine.
            now: monotonic nanoseconds.

        Returns:
            The running nodes to kill and start again now.

        """
        had_gap = self._answered is None or now - self._answered > MAX_GAP_NS
        self._answered = now
        due = []
        for name, process in processes.items():
            node = self._nodes.setdefault(name, _Node())
            if name not in names:
                node.named_since, node.grace = None, FIRST_GRACE_NS
                continue
            if had_gap or node.named_since is None:
                node.named_since = now
            if process.is_dead or now < self._kill_at(node, process):
                continue
            if process.started > node.named_since:
                node.grace = min(2 * node.grace, MAX_GRACE_NS)
            due.append(name)
        return due

    def _kill_at(self, node: _Node, process: Process) -> int:
        assert node.named_since is not None
        if process.started > node.named_since:
            return process.started + node.grace
        return max(node.named_since + UNREACHABLE_NS, process.started + MIN_START_NS)
