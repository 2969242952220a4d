"""Open-loop loads on a real cluster, what they saw, and the arithmetic of figures."""
