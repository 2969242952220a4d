"""Process runtime: transport, clock, file descriptors, and the driver that runs a node."""
