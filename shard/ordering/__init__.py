"""The order of inserts: the primary decides positions, backups guess them."""
