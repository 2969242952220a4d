"""The commands `ziplog kv ...` (docs/logdb.md, section 14)."""
