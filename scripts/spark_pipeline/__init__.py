"""The pipeline: a million flight events through the log into Spark, and the same without both."""
