"""Open-loop loads on a real cluster, their results, and statistics."""
