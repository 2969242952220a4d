"""Segment files: the format on disk, and how to read the files without a server."""
