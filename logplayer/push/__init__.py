"""Push: the contract of a target as messages between a player and a receiver (docs/player.md)."""
