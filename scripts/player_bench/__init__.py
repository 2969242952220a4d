"""The benchmark of players: `python scripts/bench.py player`."""
