"""Threads and event loops that drive the client's state machines."""
