"""A gate before the log with the dynamics of Scalog: reports, cuts and their consensus (T 3.2)."""
