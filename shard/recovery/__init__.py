"""Failure detection, recovery, state transfer and repair."""
