"""The client: a pure core of small state machines, and the façades that drive it."""
