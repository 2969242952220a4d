"""The archive: a process beside a storage server that serves what is sealed, a block at a time."""
