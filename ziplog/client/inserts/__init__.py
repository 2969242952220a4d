"""Inserts: shard selection, the in-flight window, retransmission, outcomes."""
