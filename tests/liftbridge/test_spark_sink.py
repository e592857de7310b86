"""The Spark sink in a real JVM, and a real broker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import orjson
import pytest
from pyspark.errors import PySparkException

from feedapi_client.liftbridge import RowId, row_id
from feedapi_client.spark.liftbridge_sink import LiftbridgeDataSource, parse_options
from feedapi_client.spark.source_options import OptionError
from feedapi_client.testing import Publisher
from tests.liftbridge.broker import Broker
from tests.liftbridge.middle import Fault, Middle
from tests.spark.conftest import _jvm, spark  # noqa: F401 - fixtures
from tests.spark.slow_workers import SLOW_WORKER

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.anyio, pytest.mark.spark, pytest.mark.slow]

Run = Callable[..., Any]


@pytest.fixture
def run(
    spark: SparkSession,  # noqa: F811
    feedapi_publisher: Publisher,
    broker: Broker,
    tmp_path: Path,
) -> Run:
    spark.dataSource.register(LiftbridgeDataSource)

    async def run(*select: str, checkpoint: Path = tmp_path / "checkpoint", **options: str) -> None:
        """Publish what the feed holds now, in one query."""
        rows = (
            spark.readStream.format("feedapi")
            .option("url", feedapi_publisher.url)
            .option("stagingLocation", f"file://{tmp_path}/staging")
            .load()
        )
        writer = (
            rows.selectExpr(*select)
            .writeStream.format("liftbridge")
            .options(**{"stream": broker.name, "nats": broker.nats_url, **options})
        )
        writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        while True:
            query = writer.start()  # in this thread, whose session has the source
            try:
                await anyio.to_thread.run_sync(query.awaitTermination)
            except PySparkException as error:
                if SLOW_WORKER not in str(error):
                    raise
            else:
                return

    return run


async def rows(broker: Broker, stream: str = "", partition: int = 0) -> list[tuple[RowId, int]]:
    found = []
    for stored in await broker.messages(stream, partition):
        identity = row_id(stored)
        assert identity is not None
        found.append((identity, orjson.loads(stored.value)["n"]))
    return found


async def test_each_row_is_an_acked_message_with_its_identity(
    run: Run, feedapi_publisher: Publisher, broker: Broker
) -> None:
    await broker.create()
    feedapi_publisher.extend(0, [{"n": n} for n in range(500)])
    await run(
        "data AS value",
        "CAST(sequence AS STRING) AS key",
        "map('source', 'spark', 'feedapi-query', 'x', 'feedapi-row', '7') AS headers",
    )
    found = await rows(broker)
    assert [n for _, n in found] == list(range(500))
    assert len({identity for identity, _ in found}) == 500
    assert len({identity.query for identity, _ in found}) == 1
    assert found[0][0].query != "x"
    assert all(
        message.headers["source"] == b"spark" and message.key.isdigit()
        for message in await broker.messages()
    )


async def test_a_batch_that_is_written_again_has_the_same_identities(
    run: Run, feedapi_publisher: Publisher, broker: Broker, tmp_path: Path
) -> None:
    await broker.create()
    feedapi_publisher.extend(0, [{"n": n} for n in range(200)])
    await run("data AS value")
    # As after a crash of the driver between the sink and Spark's own commit of the last batch.
    last = max(
        (tmp_path / "checkpoint" / "commits").iterdir(),
        key=lambda path: int(path.name) if path.name.isdecimal() else -1,
    )
    last.unlink()
    (tmp_path / "checkpoint" / "commits" / f".{last.name}.crc").unlink(missing_ok=True)
    feedapi_publisher.extend(0, [{"n": n} for n in range(200, 300)])
    await run("data AS value")
    found = await rows(broker)
    assert len(found) > 300
    by_identity: dict[RowId, int] = {}
    for identity, n in found:
        assert by_identity.setdefault(identity, n) == n
    assert list(by_identity.values()) == list(range(300))


async def test_the_partition_column_and_the_key_choose_the_partition(
    run: Run, feedapi_publisher: Publisher, broker: Broker, tmp_path: Path
) -> None:
    await broker.create(partitions=3)
    keyed = await broker.create(f"{broker.name}-keyed", partitions=3)
    feedapi_publisher.extend(0, [{"n": n} for n in range(90)])
    await run(
        "data AS value",
        "CAST(get_json_object(data, '$.n') AS INT) % 3 AS partition",
        partitions="3",
    )
    for partition in range(3):
        assert [n for _, n in await rows(broker, partition=partition)] == list(
            range(partition, 90, 3)
        )
    key, another = "get_json_object(data, '$.n') AS key", tmp_path / "another"
    await run("data AS value", key, checkpoint=another, stream=keyed.name, partitions="3")
    count = 0
    for partition in range(3):
        messages = await broker.messages(keyed.name, partition)
        assert all(keyed.partition_of(message.key) == partition for message in messages)
        count += len(messages)
    assert count == 90


async def test_lost_acks_are_retried(
    run: Run, feedapi_publisher: Publisher, broker: Broker, middle: Middle
) -> None:
    await broker.create()
    feedapi_publisher.extend(0, [{"n": n} for n in range(20)])
    middle.script(None, None, Fault.LOSE)
    await run("data AS value", nats=middle.url, ackTimeout="1", attempts="1000")
    assert {n for _, n in await rows(broker)} == set(range(20))


async def test_wrong_columns_are_an_error_before_any_job(
    run: Run, feedapi_publisher: Publisher
) -> None:
    feedapi_publisher.append(0, {"n": 1})
    with pytest.raises(Exception, match="the columns are value"):
        await run("data", "partition AS value")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "missing required field `stream`"),
        ({"stream": "s", "colour": "red"}, "unknown field `colour`"),
        ({"stream": "s", "partitions": "many"}, r"Expected `int`.* at `\$.partitions`"),
        ({"stream": "s", "ackPolicy": "none"}, "ackpolicy"),
        ({"stream": "s", "partitions": "0"}, "`int` >= 1"),
        ({"stream": "s", "maxInFlight": "0"}, "maxinflight"),
        ({"stream": "s", "attempts": "-1"}, "`int` >= 1"),
        ({"stream": "s", "ackTimeout": "nan"}, "acktimeout"),
        ({"stream": "s", "ackTimeout": "inf"}, "acktimeout"),
        ({"stream": "s", "subject": "a.*"}, "'a.*' is no subject that can be published to"),
        ({"stream": "s", "nats": " "}, "nats"),
        ({"stream": "a b"}, "'a b' can't be the name of a stream"),
    ],
)
def test_wrong_options_are_a_clear_error(options: dict[str, str], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        parse_options(options)


def test_servers_come_from_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_options({"stream": "s", "nats": "nats://a, nats://b"}).servers() == [
        "nats://a",
        "nats://b",
    ]
    by_name = parse_options({"stream": "s", "natsEnv": "FEEDAPI_TEST_NATS"})
    with pytest.raises(OptionError, match="FEEDAPI_TEST_NATS"):
        by_name.servers()
    monkeypatch.setenv("FEEDAPI_TEST_NATS", "nats://user:secret@c")
    assert by_name.servers() == ["nats://user:secret@c"]
    assert "secret" not in repr(by_name)
