"""What all messages share: the version, the limits, the types of fields."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

#: Stands in every frame: a tag is `VERSION * 256 + code`.
VERSION: Final = 1
#: No outline has more stretches.
MAX_STEPS: Final = 4096

Request = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
