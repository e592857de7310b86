"""Bronze, silver, rejected and gold of a feed of orders."""

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from feedapi_client.spark.ingest import latest

SCHEMA = "entity STRING, status STRING, amount DOUBLE, _corrupt STRING"

spark = SparkSession.active()


@dp.table
def orders_bronze() -> DataFrame:
    """Every event, as sent. PySpark finds the format where feedapi-client is installed."""
    feed = spark.readStream.format("feedapi")
    if "FEED_STAGING" in os.environ:
        feed = feed.option("stagingLocation", os.environ["FEED_STAGING"])
    return feed.load(os.environ["FEED_URL"])


def typed() -> DataFrame:
    """Events with typed columns."""
    # `select`, not `withColumn`: with that one Spark 4.3.0 takes the table for one from outside of
    # the pipeline from the second run on, and does not wait until `orders_bronze` is up to date.
    event = F.from_json("data", SCHEMA, {"columnNameOfCorruptRecord": "_corrupt"}).alias("event")
    return spark.readStream.table("orders_bronze").select(
        "partition", "depth", "sequence", "data", event
    )


@dp.table
def orders_silver() -> DataFrame:
    """Events that fit."""
    fitting = typed().where("event._corrupt is null and event.entity is not null")
    columns = ("partition", "depth", "sequence", "data")
    return fitting.select(*columns, "event.entity", "event.status", "event.amount")


@dp.table
def orders_rejected() -> DataFrame:
    """Events that don't fit."""
    rejected = typed().where("event._corrupt is not null or event.entity is null")
    return rejected.select("partition", "depth", "sequence", "data")


@dp.materialized_view
def orders() -> DataFrame:
    """The latest state of each order."""
    return latest(spark.read.table("orders_silver"), ["entity"], "status = 'deleted'")
