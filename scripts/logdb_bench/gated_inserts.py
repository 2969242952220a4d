"""LogDB behind an ordering layer (`scalog.gated`): its commits wait for cuts, its readers as well.

As a program, this file takes the place of `python -m logdb`, with the endpoints of the layer's
nodes before its arguments.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

import msgspec
from scalog.gated import GatedCore
from scalog.messages import Cut

import logdb.__main__
import logdb.client.core
import logdb.coordinator.node
import logdb.wire
from ziplog.wire import AnyMessage, decoder_of

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Returns the message of a frame, of LogDB, the log or the ordering layer.
decode: Final = decoder_of(
    msgspec.msgpack.Decoder(AnyMessage | logdb.wire.ClientRequest | logdb.wire.Reply | Cut)
)


def install(layer: Sequence[str]) -> None:
    """Put coordinators and clients that this process makes from now on behind a gate."""
    core = partial(GatedCore, layer)
    logdb.client.core.ClientCore = core  # type: ignore[misc, assignment]
    logdb.coordinator.node.ClientCore = core  # type: ignore[misc, assignment]
    logdb.wire.decode = decode  # type: ignore[misc]
    logdb.__main__.decode = decode  # type: ignore[misc]


if __name__ == "__main__":
    install(sys.argv[1].split(","))
    sys.exit(logdb.__main__.main(sys.argv[2:]))
