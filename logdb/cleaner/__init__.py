"""Checkpoints and the cleaner of the log's oldest segments (docs/logdb.md, section 8)."""
