"""Storage servers: the replicas of the shards."""
