"""Reading in bulk: Spark over the log beside Parquet."""
