"""Bulk reads: extents, outlines and scans of a range."""
