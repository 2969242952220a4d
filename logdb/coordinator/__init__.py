"""A coordinator: follows the log, keeps the state, decides, and answers clients."""
