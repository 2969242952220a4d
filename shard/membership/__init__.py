"""A replica and the membership service: leases, heartbeats, draining."""
