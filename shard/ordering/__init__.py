"""The order of inserts: the primary decides positions, and backups guess them."""
