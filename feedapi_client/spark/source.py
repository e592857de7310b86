"""The Spark data source ``feedapi``."""

from __future__ import annotations

import uuid

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from feedapi_client.spark.batch import FeedReader
from feedapi_client.spark.schema import spark_schema
from feedapi_client.spark.source_options import OptionError, SourceOptions, parse_options
from feedapi_client.spark.staging import default_location
from feedapi_client.spark.stream import FeedStreamReader


def register(spark: SparkSession) -> None:
    """Register ``format("feedapi")`` with a session, of Spark itself or of Spark Connect."""
    spark.dataSource.register(FeedDataSource)


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is one of Spark Connect, which has no context."""
    return getattr(spark, "sparkContext", None) is None


class FeedDataSource(DataSource):
    """``format("feedapi")``.

    Every method raises `OptionError` for options that are unknown, missing or wrong, before any
    job starts.
    """

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "feedapi"

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._dataframe = uuid.uuid4().hex

    def _options(self) -> SourceOptions:
        return parse_options(self.options)

    def schema(self) -> StructType:
        """Return the columns."""
        self._options()
        return spark_schema()

    def reader(self, schema: StructType) -> FeedReader:
        """Return the batch reader."""
        options = self._options()
        _check_schema(schema)
        return FeedReader(options, self._dataframe)

    def streamReader(self, schema: StructType) -> FeedStreamReader:  # noqa: N802
        """Return the streaming reader.

        Without option ``stagingLocation``, epochs are staged in a folder of this machine.
        """
        options = self._options()
        _check_schema(schema)
        if options.ending_cursors:
            raise OptionError(
                "feedapi source: option endingCursors bounds a batch read, and a stream goes on: "
                "leave it out, or take spark.read"
            )
        return FeedStreamReader(options, options.staging_location or default_location())


def _check_schema(given: StructType) -> None:
    own = spark_schema()
    columns, wanted = ([(f.name, f.dataType) for f in schema] for schema in (given, own))
    if columns != wanted:
        raise OptionError(
            f"feedapi source: the columns are {own.simpleString()}: leave out .schema(...), and "
            "select or cast afterwards"
        )
