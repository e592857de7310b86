"""How the tests start Spark."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from pyspark.sql import SparkSession

from feedapi_client.spark import FeedDataSource
from tests.spark import jvm
from tests.spark.python_path import python_path

LOCAL = "local[2,8]"
"""Two threads. A task is tried eight times, because a worker that starts slowly fails it."""
CLUSTER = "local-cluster[2,1,1024]"
"""Two executors in JVMs of their own."""

_CHECKPOINTS = "spark.sql.streaming.checkpointFileManagerClass"
_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.{}CheckpointFileManager"
OF_SEVERAL = {
    _CHECKPOINTS: _MANAGER.format("FileContextBased"),
    "spark.delta.logStore.file.impl": "io.delta.storage.HDFSLogStore",
}
"""The defaults, for JVMs that write to the same checkpoint or table."""
_CONFIGURATION = {
    # By default Hadoop starts `readlink` eight times for each file of a checkpoint. On a busy
    # machine each of these processes takes 0.1 s.
    _CHECKPOINTS: _MANAGER.format("FileSystemBased"),
    "spark.ui.enabled": "false",
    "spark.driver.memory": "600m",
    "spark.executor.memory": "1024m",
    # Compiling a query costs more than running it on tables this small.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.streaming.numRecentProgressUpdates": "20",
    "spark.task.maxFailures": "8",
    # A busy machine is slow, not broken.
    "spark.network.timeout": "600s",
    "spark.python.authenticate.socketTimeout": "300s",
}


def configuration() -> dict[str, str]:
    """Return what is set for every JVM of the tests."""
    kinds = ("driver", "executor")
    return _CONFIGURATION | {f"spark.{kind}.extraJavaOptions": jvm.options() for kind in kinds}


def session(master: str, more: Mapping[str, str] | None = None) -> SparkSession:
    """Start a session with the source registered, and with `more` configuration."""
    builder: Any = SparkSession.builder.master(master)
    builder = builder.config("spark.executorEnv.PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    for name, value in {**configuration(), **(more or {})}.items():
        builder = builder.config(name, value)
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(FeedDataSource)
    return spark


@cache
def local_session() -> SparkSession:
    """The session of this process, started once, whichever module of tests asks first."""
    os.environ.update(
        PYSPARK_PYTHON=sys.executable,
        SPARK_LOCAL_IP="127.0.0.1",
        PYTHONPATH=python_path(),
        FEEDAPI_TEST_TOKEN="s3cr3t-t0ken",
    )
    # It logs each command, also from a thread of its own at any time, and tests read all logs.
    logging.getLogger("py4j").setLevel(logging.WARNING)
    spark = session(LOCAL)
    atexit.register(spark.stop)
    return spark
