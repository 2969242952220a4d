"""The state of a replica: decisions, sessions, epochs."""
