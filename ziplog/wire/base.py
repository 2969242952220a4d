"""The protocol version, limits and field types that all messages share."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

#: The first version of the wire format. The version that introduced a message is part of its tag:
#: `version * 256 + code`.
VERSION: Final = 1
#: Maximum number of stretches in an outline.
MAX_STEPS: Final = 4096

#: A version of the wire format, as far as a tag can carry it.
Wire = Annotated[int, Meta(ge=1, le=255)]
Request = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
