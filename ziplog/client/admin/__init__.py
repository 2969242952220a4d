"""Calls about the whole cluster: status, trims, changes of shards."""
