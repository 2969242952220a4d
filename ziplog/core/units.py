"""Units of time: every time and duration inside a node is in nanoseconds."""

from typing import Final

NS_PER_US: Final = 1000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
#: A time that never comes.
NEVER: Final = 2**63 - 1
