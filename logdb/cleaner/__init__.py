"""Checkpoints, and the cleaner of the log's old segments (docs/logdb.md, section 8)."""
