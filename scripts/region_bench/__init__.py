"""Measurements of a log across regions, and of other systems behind the same router."""
