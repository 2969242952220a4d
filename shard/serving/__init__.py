"""Readers of a shard."""
