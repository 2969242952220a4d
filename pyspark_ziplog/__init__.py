"""Registers `format("ziplog")`: Spark looks for `DefaultSource` in modules named `pyspark_*`."""

from spark_reader.data_source import ZiplogDataSource as DefaultSource

__all__ = ["DefaultSource"]
