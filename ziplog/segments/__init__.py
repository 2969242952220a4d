"""Segment files: how records are stored, and how whoever has the files reads them."""
