"""Measurements of the log: latency, throughput, failures, reconfiguration, membership."""
