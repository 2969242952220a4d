"""Apache Spark reads and writes the log, and tools read it in bulk (docs/spark.md)."""
