"""The processes' input and output: sockets, clocks, descriptors, the driver of a node."""
