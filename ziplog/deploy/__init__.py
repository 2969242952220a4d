"""Clusters on one machine: start, restart and add the processes."""
