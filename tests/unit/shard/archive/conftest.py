from tests.unit.shard.archive.logs import segments
from tests.unit.shard.archive.processes import started

__all__ = ["segments", "started"]
