"""The membership service: it owns epochs, shards, views and the trim point."""
