"""Readers of a shard: reads, subscriptions and tail queries."""
