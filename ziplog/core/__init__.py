"""Pure data types shared by all processes: positions, leases, events and effects."""
