"""Faults for the nodes of a cluster on this machine: from outside, and inside their processes."""
