"""What touches the world: sockets, clocks, threads, consensus."""
