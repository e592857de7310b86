"""What the Spark tests share: one JVM, for all that do not kill theirs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from feedapi_client.spark.http_clients import http_clients

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_connection_stays_open() -> Iterator[None]:
    yield
    http_clients.close()


@pytest.fixture(scope="session")
def _jvm() -> None:
    """A missing JVM is a failure, never a skip: a pipeline nobody ran is not tested."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if (
        java is None
        or subprocess.run([java, "-version"], capture_output=True, check=False).returncode
    ):
        pytest.fail(
            "the Spark tests need a JVM 17 or later: install one, or set JAVA_HOME", pytrace=False
        )


needs_jvm = pytest.mark.usefixtures("_jvm")


@pytest.fixture(scope="session")
def spark(_jvm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session on this machine, with the source registered."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ.update(
        PYSPARK_PYTHON=sys.executable,
        SPARK_LOCAL_IP="127.0.0.1",
        PYTHONPATH=path,
        FEEDAPI_TEST_TOKEN="s3cr3t-t0ken",
    )
    from tests.spark.driver import session

    spark = session("local[2]")
    spark.sparkContext.setLogLevel("ERROR")
    from feedapi_client.spark import FeedDataSource

    spark.dataSource.register(FeedDataSource)
    yield spark
    spark.stop()
