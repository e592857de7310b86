"""A feed as a Spark DataFrame, in batch and as an exactly-once stream (extra ``spark``).

Needs PySpark 4.2 or later::

    from feedapi_client.spark import register

    register(spark)
    spark.read.format("feedapi").option("url", "https://service/myfeed").load()

    stream = spark.readStream.format("feedapi").option("url", "https://service/myfeed")
    stream.option("stagingLocation", "s3://bucket/staging").load()

Where the wheel is installed, PySpark finds the format by itself, without `register`.
`feedapi_client.spark.source_options.OPTION_NAMES` lists the options,
`feedapi_client.spark.schema.spark_schema` the columns.
"""

try:
    import numpy  # noqa: F401
    import obstore  # noqa: F401
    import pyarrow  # noqa: F401
    import pyspark.sql.streaming.datasource  # noqa: F401 - since PySpark 4.2
except ImportError as error:
    from importlib.metadata import distributions

    found = next((one.version for one in distributions(name="pyspark")), None)
    if found is not None and tuple(map(int, found.split(".")[:2])) < (4, 2):
        raise ImportError(
            f"feedapi_client.spark needs PySpark 4.2 or newer, and {found} is installed: "
            "pip install 'pyspark>=4.2', on the driver and on all executors"
        ) from error
    raise ImportError(
        "feedapi_client.spark needs the extra 'spark': pip install 'feedapi-client[spark]'"
    ) from error

from feedapi_client.spark.java import JavaError, ensure_java
from feedapi_client.spark.source import FeedDataSource, register
from feedapi_client.spark.source_options import OptionError, SourceOptions
from feedapi_client.spark.staging import StagingError

__all__ = [
    "FeedDataSource",
    "JavaError",
    "OptionError",
    "SourceOptions",
    "StagingError",
    "ensure_java",
    "register",
]
