"""Histories of client operations: the file format, the recording clients, and the checker."""
