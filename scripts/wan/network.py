"""A network of regions: the router's process, and processes inside regions."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Final

from wan import namespaces
from wan.delay_queue import Path
from ziplog.core.units import NS_PER_MS
from ziplog.runtime.child_processes import environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Self

_FOLDER: Final = FilePath(__file__).resolve().parent
_STOP_S: Final = 10.0


class Network:
    """A context manager: the namespaces live as long as it, and the processes inside."""

    def __init__(self, regions: Sequence[str], seed: int = 0) -> None:
        """Prepare regions without delays.

        Args:
            regions: their names; the first has number 0.
            seed: of jitter and loss.

        """
        self.regions: Final = tuple(regions)
        self._seed: Final = seed
        self._paths: Final[dict[tuple[str, str], Path]] = {}
        self._router: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        """Start the router.

        Raises:
            RuntimeError: it ended; says why.

        """
        script = str(_FOLDER / "router.py")
        command = [*namespaces.AS_ROOT, sys.executable, script, str(len(self.regions))]
        self._router = subprocess.Popen(
            [*command, str(self._seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self._receive()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the router; the namespaces end with their last process."""
        router = self._process
        router.stdin.close()  # type: ignore[union-attr]
        router.wait(_STOP_S)
        router.stdout.close()  # type: ignore[union-attr]

    @property
    def pid(self) -> int:
        """The router's process id, by which `namespaces.enter` finds the regions."""
        return self._process.pid

    def address(self, region: str) -> str:
        """Return the address of a region."""
        return namespaces.address(self.regions.index(region))

    def enter(self, region: str) -> None:
        """Move the calling process into a region; it must have one thread."""
        namespaces.enter(self.pid, self.regions.index(region))

    def command(self, region: str, *command: str) -> list[str]:
        """Return the command line that runs `command` inside a region."""
        script = str(_FOLDER / "inside.py")
        number = str(self.regions.index(region))
        return [sys.executable, script, str(self.pid), number, *command]

    def launcher(self) -> list[str]:
        """Return the launcher of a `ziplog.local.Cluster` whose nodes have addresses of regions."""
        return [str(_FOLDER / "node.py"), str(self.pid)]

    def set_round_trips(
        self, round_trips_ms: Mapping[tuple[str, str], float], jitter_ms: float = 0
    ) -> None:
        """Give pairs of regions their round trips: half of it each way, jitter for each way."""
        for (one, other), round_trip in round_trips_ms.items():
            delay = int(round_trip * NS_PER_MS / 2)
            for source, target in ((one, other), (other, one)):
                self.change(source, target, delay_ns=delay, jitter_ns=int(jitter_ms * NS_PER_MS))

    def change(self, source: str, target: str, **fields: Any) -> None:
        """Change fields of the path from `source` to `target`: those of `delay_queue.Path`."""
        path = replace(self._paths.get((source, target), Path()), **fields)
        self._paths[source, target] = path
        numbers = self.regions.index(source), self.regions.index(target)
        self._request({"path": [*numbers, asdict(path)]})

    def cut(self, source: str, target: str, *, is_cut: bool = True) -> None:
        """Lose all packets from `source` to `target`, or end that; not the way back."""
        self.change(source, target, is_cut=is_cut)

    def report(self) -> dict[str, Any]:
        """Return the router's processor time in seconds, and what each path has carried."""
        return self._request({})

    @property
    def _process(self) -> subprocess.Popen[str]:
        if self._router is None:
            message = "the network is not started: use it in a `with` statement"
            raise RuntimeError(message)
        return self._router

    def _request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            message = f"the router ended with {self._process.wait(_STOP_S)}; its error is above"
            raise RuntimeError(message)
        answer: dict[str, Any] = json.loads(line)
        return answer
