"""``format("feedapi")`` on a real Spark, in batch and as a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql.functions import lit

from feedapi_client.testing import Publisher
from feedapi_client.testing.publisher.faults import Rewrite
from tests.spark.micro_batches import problems, publish
from tests.spark.slow_workers import despite_slow_workers

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

Read = Callable[..., "DataFrame"]


@pytest.fixture
def read(spark: SparkSession, publisher: Publisher) -> Read:
    def read(**options: str) -> DataFrame:
        own = {"url": publisher.url, "settleTime": "0.5", **options}
        return spark.read.format("feedapi").options(**own).load()

    return read


# ---------------------------------------------------------------------- batch


def test_batch_holds_every_event_of_every_partition(read: Read, publisher: Publisher) -> None:
    publish(publisher, 200)
    (child, _) = publisher.split(0, into=2, method="starts-after")
    publish(publisher, 200)
    publisher.split(child, into=2, method="starts-after")
    publish(publisher, 200)
    table = read()
    assert table.columns == ["partition", "cursor", "sequence", "data", "headers", "depth"]
    assert dict(table.dtypes) == {
        "partition": "int",
        "cursor": "string",
        "sequence": "bigint",
        "data": "string",
        "headers": "map<string,string>",
        "depth": "int",
    }
    assert problems((row.asDict() for row in table.collect()), publisher.payloads()) == []


def test_batch_has_one_task_for_each_lineage_chain(read: Read, publisher: Publisher) -> None:
    publish(publisher, 50)
    publisher.split(0, into=1, method="starts-after")
    publisher.split(1, into=2, method="starts-after")
    assert read().rdd.getNumPartitions() == 4  # 0 and its only child; 1; its two children


def test_headers_of_dialect_v1_are_a_map(read: Read, publisher: Publisher) -> None:
    publisher.dialect = "v1"
    publisher.append(0, {"n": 1}, headers={"source": "a"})
    publisher.append(0, {"n": 2})
    rows = read(v1Partitions="2", v1Headers="_all").orderBy("sequence").collect()
    assert [row.headers for row in rows] == [{"source": "a"}, None]


def test_scans_of_one_dataframe_in_one_action_see_one_end(spark: SparkSession) -> None:
    publisher, numbers = Publisher(partitions=2, page_size=100, checkpoint_every=1), count()

    def grow(events: int) -> None:
        for n in islice(numbers, events):
            publisher.append(n % 2, {"n": n})

    def grown(body: bytes) -> bytes:
        grow(2)
        return body

    grow(50)
    publisher.fail(Rewrite(grown), times=None)
    with publisher.serve():
        feed = spark.read.format("feedapi").load(publisher.url)
        table = feed.select("partition", "sequence")
        for kind, hint in (("inner", "broadcast"), ("full", "merge")):
            other = table.withColumn("other", lit(1)).hint(hint)
            joined = table.withColumn("one", lit(1)).join(other, ["partition", "sequence"], kind)
            rows = joined.collect()
            assert 50 <= len(rows) < 60
            assert [row for row in rows if row.one is None or row.other is None] == []
            grow(50)
        assert table.union(table).count() == 2 * len(rows)
        assert spark.read.format("feedapi").load(publisher.url).count() > 150


TOO_DEEP = b'{"n":1,"x":%b}' % (b"[" * 1_200 + b"]" * 1_200)


def test_payloads_become_variants_in_sql(read: Read, publisher: Publisher) -> None:
    """As the page says. What is no JSON, or too deep, is null there, and still in `data`."""
    publish(publisher, 30)
    publisher.append(0, TOO_DEEP, entity="deep")
    publisher.append(0, {"text": "MARK"})
    publisher.fail(Rewrite(lambda body: body.replace(b"MARK", b"\xff\xfe")), times=None)
    table = read().selectExpr("data", "try_parse_json(data) AS parsed")
    total = table.selectExpr("sum(try_variant_get(parsed, '$.n', 'int')) AS total").first()
    assert total is not None
    assert total.total == sum(range(30))
    assert {row.data for row in table.where("parsed IS NULL").collect()} >= {TOO_DEEP.decode()}
    assert table.where("data IS NULL").count() == 0
    assert table.count() == 32


def test_payloads_are_kept_byte_for_byte(read: Read, publisher: Publisher) -> None:
    raw = b'{ "a" : "\\u00e6\xe2\x80\xa8\xc2\x85", "b":1.50 }'
    publisher.append(0, raw)
    assert read().first().data == raw.decode()  # type: ignore[union-attr]


def test_filters_keep_the_spelling_of_the_feed(spark: SparkSession) -> None:
    publisher = Publisher(
        dialect="v2-draft",
        filters={"Subject": lambda payload, value: payload["n"] % 10 == int(value)},
    )
    publish(publisher, 50)
    with publisher.serve() as url:
        assert (
            spark.read.format("feedapi")
            .option("url", url)
            .option("filter.Subject", "3")
            .load()
            .count()
            == 5
        )


def test_feed_without_partitions_is_an_empty_table(spark: SparkSession) -> None:
    with Publisher(partitions=0).serve() as url:
        assert spark.read.format("feedapi").load(url).count() == 0


# ---------------------------------------------------------------------- options and secrets


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pagesizehints": "3"}, r"unknown option pagesizehints \(did you mean pageSizeHint\?\)"),
        ({"maxEventsPerPartition": "many"}, "option maxEventsPerPartition must be a whole number"),
        ({"url": "ftp://x"}, "option url must be an http or https URL"),
        (
            {"header.Authorization": "Bearer s3cr3t-t0ken"},
            "option header.authorization would put a secret into the query plan",
        ),
    ],
)
def test_wrong_option_fails_before_any_job(
    read: Read, options: dict[str, str], message: str
) -> None:
    with pytest.raises(AnalysisException, match=message) as caught:
        read(**options)
    assert "s3cr3t" not in str(caught.value)


def test_table_of_a_catalog_is_refused_and_a_view_is_what_the_error_says(
    spark: SparkSession, publisher: Publisher
) -> None:
    """Spark 4 gives the options of a table when it is made, and none when it is read."""
    publish(publisher, 30)
    using = f"USING feedapi OPTIONS (url '{publisher.url}')"
    with pytest.raises(PySparkException, match="TABLE write CREATE TEMPORARY VIEW name USING fee"):
        spark.sql(f"CREATE TABLE orders_of_a_feed {using}")
    assert not spark.catalog.tableExists("orders_of_a_feed")
    spark.sql(f"CREATE TEMPORARY VIEW orders_of_a_feed {using}")
    try:
        assert spark.table("orders_of_a_feed").count() == 30
    finally:
        spark.catalog.dropTempView("orders_of_a_feed")


def test_schema_of_the_user_is_refused(spark: SparkSession, publisher: Publisher) -> None:
    with pytest.raises(PySparkException, match=r"leave out \.schema"):
        spark.read.format("feedapi").schema("a int").load(publisher.url).count()


@pytest.mark.parametrize(
    "options",
    [
        {"authEnv": "FEEDAPI_TEST_TOKEN"},
        {
            "headerEnv.X-Other": "FEEDAPI_TEST_TOKEN",
            "authCallable": "tests.spark.credentials:token",
        },
        {"authCallable": "tests.spark.credentials:headers"},
    ],
)
def test_r19_credentials_reach_the_publisher_and_no_plan(
    read: Read, publisher: Publisher, capsys: pytest.CaptureFixture[str], options: dict[str, str]
) -> None:
    publisher.bearer = "s3cr3t-t0ken"
    publish(publisher, 10)
    table = read(**options)
    assert table.count() == 10
    table.explain(True)
    assert "s3cr3t" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        ("FEEDAPI_TEST_TOKEN", r"AuthenticationError.*status 403"),
        ("NO_SUCH_VARIABLE", "the environment variable NO_SUCH_VARIABLE is not set"),
    ],
)
def test_r19_credentials_that_are_wrong_or_missing_are_a_clear_error(
    read: Read, publisher: Publisher, variable: str, says: str
) -> None:
    publisher.bearer = "another"
    with pytest.raises(PySparkException, match=says) as caught:
        read(authEnv=variable).count()
    assert "s3cr3t" not in str(caught.value)


# ---------------------------------------------------------------------- streams


@pytest.fixture
def stream(
    spark: SparkSession, publisher: Publisher, tmp_path: Path
) -> Iterator[Callable[..., StreamingQuery]]:
    queries: list[StreamingQuery] = []

    def stream(trigger: dict[str, Any], **options: str) -> StreamingQuery:
        source = (
            spark.readStream.format("feedapi")
            .options(
                **{"url": publisher.url, "stagingLocation": str(tmp_path / "staging"), **options}
            )
            .load()
        )
        writer = (
            source.writeStream.format("parquet")
            .option("path", str(tmp_path / "table"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
        )
        queries.append(writer.trigger(**trigger).start())
        return queries[-1]

    yield stream
    for query in queries:
        query.stop()


def wait(predicate: Callable[[], object], timeout: float = 300) -> None:
    end = time.monotonic() + timeout
    while not predicate():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_second_available_now_run_reads_only_new_events(
    spark: SparkSession, stream: Callable[..., StreamingQuery], publisher: Publisher, tmp_path: Path
) -> None:
    publish(publisher, 300)
    options = {"maxEventsPerPartition": "100"}
    despite_slow_workers(lambda: stream({"availableNow": True}, **options).awaitTermination())
    publisher.split(0, into=2, method="cursor-from")
    publish(publisher, 100)
    despite_slow_workers(lambda: stream({"availableNow": True}).awaitTermination())
    rows = (row.asDict() for row in spark.read.parquet(str(tmp_path / "table")).collect())
    assert problems(rows, publisher.payloads()) == []


def test_idle_triggers_write_no_batch_and_progress_is_reported(
    stream: Callable[..., StreamingQuery], publisher: Publisher, tmp_path: Path
) -> None:
    publish(publisher, 100)
    commits = tmp_path / "checkpoint" / "commits"

    def first_batch() -> StreamingQuery:
        query = stream({"processingTime": "100 milliseconds"}, maxPollInterval="0.2")
        wait(lambda: (commits / "0").exists() or not query.isActive)
        query.awaitTermination(1)  # raises what ended it
        return query

    query = despite_slow_workers(first_batch)
    wait(lambda: publisher.counters["fetch"] > 12)
    assert not (commits / "1").exists()
    publish(publisher, 50)
    wait((commits / "1").exists)
    latest = query.lastProgress["sources"][0]["latestOffset"]
    assert (json.loads(latest) if isinstance(latest, str) else latest)["partitions"] == 2
