"""The local Spark session of the whole test run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from feedapi_client.spark import ensure_java
from feedapi_client.spark.feed_access import kept_client
from feedapi_client.spark.feed_watch import FeedWatch
from feedapi_client.testing import Publisher
from tests import components

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.lake import Lake
    from tests.spark.micro_batches import Start

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_connection_stays_open() -> Iterator[None]:
    yield
    kept_client.cache_clear()


@pytest.fixture(autouse=True)
def _no_watch_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its last request would be one of the next test's."""
    made: list[FeedWatch] = []
    begin = FeedWatch.__init__

    def noted(watch: FeedWatch, *args: Any, **given: Any) -> None:
        begin(watch, *args, **given)
        made.append(watch)

    monkeypatch.setattr(FeedWatch, "__init__", noted)
    yield
    for watch in made:  # those of drivers that have crashed, too
        watch.close()
    for thread in threading.enumerate():
        if thread.name == "feedapi-watch":
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _short_triggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only in this process: an idle trigger of a query of Spark's own takes longer."""
    monkeypatch.setattr("feedapi_client.spark.stream._PAUSE", 0.02)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(partitions=2, page_size=40, checkpoint_every=10, seed=7)
    with publisher.serve():
        yield publisher


@pytest.fixture
def start(publisher: Publisher, tmp_path: Path) -> Start:
    """Begins queries that stage in one folder, without a JVM."""
    from tests.spark.micro_batches import query

    return partial(query, publisher, tmp_path)


@pytest.fixture(scope="session")
def _jvm() -> None:
    """The Java that Spark runs on; skipped without one, but not in CI."""
    components.require("java")
    ensure_java()


needs_jvm = pytest.mark.usefixtures("_jvm")


@pytest.fixture(scope="session")
def spark(_jvm: None) -> SparkSession:
    """The local session of this process, with the source registered."""
    from tests.spark.sessions import local_session

    return local_session()


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    """A feed and the Delta tables of one query, which all tests of a module use."""
    from tests.spark.lake import Lake

    lake = Lake(spark, tmp_path_factory.mktemp("lake"))
    with lake.publisher.serve():
        yield lake
    spark.sql("DROP DATABASE lake CASCADE")
