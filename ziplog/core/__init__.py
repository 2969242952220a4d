"""Pure data that every part shares: positions, leases, events and effects."""
