from tests.shard.archive.logs import segments
from tests.shard.archive.processes import started

__all__ = ["segments", "started"]
