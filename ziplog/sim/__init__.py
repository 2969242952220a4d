"""A deterministic world for the real servers and clients: virtual time, everything from one seed.

The kernel has the clock; network, disks, processes and consensus are made on it. What runs in it is
what runs in production, down to the driver's turns (docs/simulation.md).
"""
