"""Seals: calls that wait until no later record can get a position before theirs."""
