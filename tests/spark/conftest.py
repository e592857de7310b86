"""The local Spark session of the whole test run."""

from __future__ import annotations

import os
import shutil
import subprocess
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
    """Fail without a JVM. Never skip: a pipeline that was not run is not tested."""
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
def spark(_jvm: None) -> SparkSession:
    """The local session of this process, with the source registered."""
    from tests.spark.sessions import local_session

    return local_session()
