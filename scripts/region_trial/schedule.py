"""The order of the faults of regions (pure)."""

from __future__ import annotations

import random
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Seconds that a fault of each kind lasts.
KINDS: Final = {
    #: All processes of a region are killed, and started again.
    "kill": 15.0,
    #: No packet enters or leaves a region.
    "cut": 30.0,
    #: The round trips of a region are five times as long.
    "slow": 15.0,
    #: Two regions cannot reach each other; both reach the third.
    "part": 15.0,
}


class RegionFault(NamedTuple):
    """A fault of a region."""

    kind: str
    region: str
    #: The next region: with `part`, the one that `region` cannot reach. The shard of the two has
    #: its primary in `region`, and its backup here.
    other: str
    seconds: float

    def __str__(self) -> str:
        """Return the fault in words."""
        what = f"part {self.region} {self.other}" if self.kind == "part" else self.kind_of_one
        return f"{what} for {self.seconds:g} s"

    @property
    def kind_of_one(self) -> str:
        """The kind and its region."""
        return f"{self.kind} {self.region}"

    def writing(self, regions: Sequence[str]) -> list[str]:
        """Return the regions whose writers must continue during the fault."""
        if self.kind in {"slow", "part"}:
            return list(regions)
        return [region for region in regions if region != self.region]

    def reading(self, regions: Sequence[str]) -> list[str]:
        """Return the regions whose readers must continue during the fault.

        With `part`, the next view of the shard of the two has a server in one of them only, and the
        reader in the other one waits.
        """
        lost = {"slow": (), "part": (self.region, self.other)}.get(self.kind, (self.region,))
        return [region for region in regions if region not in lost]


def faults(
    regions: Sequence[str], kinds: Sequence[str], seed: int, scale: float = 1.0
) -> Iterator[RegionFault]:
    """Yield faults without end, one of each kind a round.

    After as many rounds as regions, each kind has hit each region once.

    Args:
        regions: in the order of the shards' primaries.
        kinds: keys of `KINDS`, in the order of a round.
        seed: of the first region of each kind.
        scale: of the durations.

    """
    chance = random.Random(seed)  # noqa: S311 - no secret
    first = {kind: chance.randrange(len(regions)) for kind in kinds}
    for number in count():
        for kind in kinds:
            index = (first[kind] + number) % len(regions)
            other = regions[(index + 1) % len(regions)]
            yield RegionFault(kind, regions[index], other, KINDS[kind] * scale)
