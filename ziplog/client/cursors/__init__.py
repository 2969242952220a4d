"""Cursors of a client: claims, moves, and operators' changes."""
