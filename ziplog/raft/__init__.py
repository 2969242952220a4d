"""Consensus for the replicated services: PySyncObj with its own journal and receive path."""
