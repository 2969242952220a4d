"""The failure handler: it recovers a shard whose server failed (docs/protocol.md, section 11)."""
