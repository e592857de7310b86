"""Registers the source with a session, and gives it the cluster's settings of S3."""

from __future__ import annotations

import os
from typing import Any

from pyspark.sql import SparkSession

from feedapi_client.spark.source import FeedDataSource
from feedapi_client.spark.staging.s3a import s3a_environment


def register(spark: SparkSession, *, staging: str | None = None) -> None:
    """Register ``format("feedapi")`` with a session.

    The Python processes of the source, on the driver and on executors, then get the endpoint, the
    region and the credentials of the session's ``spark.hadoop.fs.s3a.*`` and ``fs.s3a.*`` settings
    as ``AWS_*`` variables, where the environment of this process has none. They are not in query
    plans. Settings that stand in Hadoop's own files are not seen. Over Spark Connect only the
    format is registered: the processes of the source belong to the server.

    Call it again when the settings changed, for queries that start afterwards.

    Arguments:
        staging: the staging location. Its bucket's own settings come first then.
    """
    context: Any = getattr(spark, "sparkContext", None)  # Spark Connect has none
    if context is None:
        spark.dataSource.register(FeedDataSource)
        return
    # What is registered keeps a copy of this dictionary; other Python functions shall not get it.
    before = dict(context.environment)
    context.environment.update(s3a_environment(spark.conf.getAll, os.environ, staging))
    try:
        spark.dataSource.register(FeedDataSource)
    finally:
        context.environment.clear()
        context.environment.update(before)
