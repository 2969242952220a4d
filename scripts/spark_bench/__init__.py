"""Benchmarks of bulk reads and writes: Spark over the log, beside Parquet."""
