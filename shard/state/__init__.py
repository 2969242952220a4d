"""The state of a replica: decision log, sessions, leases and epochs."""
