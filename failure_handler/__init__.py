"""The failure handler: recovers shards after server failures (docs/protocol.md, section 11)."""
