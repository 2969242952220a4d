"""Spark data source for the log, and bulk reads without Spark (docs/spark.md)."""
