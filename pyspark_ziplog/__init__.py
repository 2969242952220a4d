"""Makes `format("ziplog")` known to Spark, which looks for modules of such a name by itself."""

from spark_reader.data_source import ZiplogDataSource as DefaultSource

__all__ = ["DefaultSource"]
