"""A coordinator: tails the log, keeps the state, decides transactions, and serves clients."""
