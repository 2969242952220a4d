"""A later release for tests: `later_release.py MODULE --config FILE --node NAME`.

Takes the place of `python -m MODULE` (the `launcher` of `ziplog.local.Cluster`). A node that the
file `later` beside the cluster file names runs as a release that also knows wire version 2, in
which `Beat` has another tag and a checkpoint another form. All others run the present release.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ziplog.version
import ziplog.wire.node_info
from ziplog import wire
from ziplog.core.wire_use import WireRange, WireUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: The version of the later release, the versions that it knows, and the names of its nodes.
VERSION: Final = "0.2.0"
WIRES: Final = WireRange(1, 2)
LATER_FILE: Final = "later"
#: The start of a later checkpoint.
NEW_FORM: Final = b"form 2 "
#: A `Beat` begins with an array's head, the type of its tag, and the tag.
_TAG: Final = slice(1, 4)
_BEAT: Final = wire.encode(wire.Beat(1, 0, 0, 0, 0, "up"))[_TAG]
_LATER_BEAT: Final = _BEAT[:1] + bytes([_BEAT[1] + 1]) + _BEAT[2:]


def set_later(directory: Path, names: Iterable[str]) -> None:
    """Have these nodes of a cluster run the later release from their next start on."""
    (directory / LATER_FILE).write_text("\n".join(names))


def main() -> None:
    """Run the module that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("module", choices=("shard", "mms", "failure_handler"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--node", required=True)
    options, _ = parser.parse_known_args()
    later = options.config.absolute().parent / LATER_FILE
    if later.exists() and options.node in later.read_text().splitlines():
        _become_later()
    sys.argv = sys.argv[1:]
    runpy.run_module(options.module, run_name="__main__", alter_sys=True)


def _become_later() -> None:
    ziplog.wire.node_info.VERSIONS = WIRES  # type: ignore[misc]
    ziplog.version.version = lambda: VERSION  # type: ignore[assignment]
    # Modules that use the versions are imported after them.
    from shard.storage.data_directory import DataDirectory  # noqa: PLC0415
    from ziplog.runtime.transport import Transport  # noqa: PLC0415

    uses: list[WireUse] = []
    _after(WireUse, "__init__", lambda use, _result: uses.append(use))
    transport, directory = Transport.send, DataDirectory.write_checkpoint

    def send(self: Transport, dst: bytes, frame: bytes) -> Any:
        if uses[0].wire >= 2 and frame[_TAG] == _BEAT:
            frame = frame[:1] + _LATER_BEAT + frame[4:]
        return transport(self, dst, frame)

    def former(received: tuple[bytes, bytes] | None) -> tuple[bytes, bytes] | None:
        if received is None or received[1][_TAG] != _LATER_BEAT:
            return received
        src, frame = received
        return src, frame[:1] + _BEAT + frame[4:]

    def write_checkpoint(self: DataDirectory, checkpoint: bytes) -> None:
        directory(self, NEW_FORM + checkpoint if uses[0].wire >= 2 else checkpoint)

    Transport.send = send  # type: ignore[method-assign]
    _map(Transport, "receive", former)
    _map(Transport, "wait_and_receive", former)
    DataDirectory.write_checkpoint = write_checkpoint  # type: ignore[method-assign]
    _map(DataDirectory, "read_checkpoint", lambda found: found and found.removeprefix(NEW_FORM))


def _after(owner: type, name: str, action: Callable[[Any, Any], object]) -> None:
    """Call `action` after each call of a method, with its object and its result."""
    method = getattr(owner, name)

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        result = method(self, *arguments, **options)
        action(self, result)
        return result

    setattr(owner, name, call)


def _map(owner: type, name: str, change: Callable[[Any], Any]) -> None:
    """Change the results of a method."""
    method = getattr(owner, name)
    setattr(owner, name, lambda self, *arguments: change(method(self, *arguments)))


if __name__ == "__main__":
    main()
