"""A network of regions on one machine: whole IP packets, delayed by pair of regions."""
