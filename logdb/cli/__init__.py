"""The verbs `ziplog kv ...` (docs/logdb.md, section 14)."""
