"""Faults of whole regions around a cluster of real processes, and the verdict on them."""
