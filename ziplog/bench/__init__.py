"""Benchmarks of a running cluster (`ziplog bench`): processes that measure, and their sum."""
