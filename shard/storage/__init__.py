"""The store: segment files, the flusher, the data directory."""
