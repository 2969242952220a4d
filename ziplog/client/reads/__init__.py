"""Reads: single records, subscriptions, tails and barriers."""
