"""What the log says: decisions at INFO, requests at DEBUG, each record with its fields."""

from __future__ import annotations

import logging

import anyio
import pytest

from feedapi_client import (
    Batch,
    FeedConsumer,
    FeedError,
    FencedError,
    MemoryCursorStore,
    RetryPolicy,
)
from feedapi_client.testing import Publisher
from tests.consumer.helpers import consume, limits, read
from tests.testing.virtual_time import asgi_client

pytestmark = pytest.mark.anyio

FEED = "http://feed/feed"


async def read_all(publisher: Publisher, caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """Read a feed to its end, and return the messages of at least this level."""
    caplog.set_level(level, logger="feedapi_client")
    async with (
        asgi_client(publisher) as http,
        FeedConsumer(FEED, http=http, follow=False, limits=limits()) as consumer,
    ):
        await read(consumer)
    ours = [record for record in caplog.records if record.name.startswith("feedapi_client")]
    for record in ours:
        assert vars(record)["feed"] == FEED
        assert record.name.count(".") >= 1, "the logger of a module"
        assert record.levelno >= logging.DEBUG
    return [record.getMessage() for record in ours if record.levelno >= level]


async def test_decisions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    publisher = Publisher(1)
    publisher.append(0, {"n": 0})
    publisher.split(0, 2, method="starts-after")
    text = "\n".join(await read_all(publisher, caplog, logging.INFO))
    assert "dialect v2" in text
    assert "3 partitions listed, 1 read: 0 from cursor" in text or "0 from '_first'" in text
    assert "partition 0: drained, committed up to" in text
    assert "partition 1: read from cursor '_first'" in text
    assert "partition 2: read from cursor '_first'" in text
    assert "discovers again, because a partition was drained" in text


async def test_a_transfer_of_cursors_and_a_new_topology_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="feedapi_client")
    publisher = Publisher(1)
    publisher.append(0, {"n": 0})
    async with (
        asgi_client(publisher) as http,
        FeedConsumer(FEED, http=http, limits=limits()) as consumer,
        anyio.create_task_group() as tasks,
    ):

        async def handle(_: object) -> None:
            """Do nothing."""

        tasks.start_soon(consumer.run, handle)
        with anyio.fail_after(60):
            while not consumer.status()[0].caught_up:  # noqa: ASYNC110
                await anyio.sleep(0.002)
            publisher.split(0, 2, method="cursor-from")
            while 2 not in consumer.status().partitions:  # noqa: ASYNC110
                await anyio.sleep(0.002)
            while "transferred" not in caplog.text:  # noqa: ASYNC110
                await anyio.sleep(0.002)
        tasks.cancel_scope.cancel()
    assert "the topology has changed; new: partitions 1, 2" in caplog.text
    assert "the cursor of partition 0 was transferred to partitions 1, 2" in caplog.text


async def test_requests_are_logged_at_debug_only(caplog: pytest.LogCaptureFixture) -> None:
    publisher = Publisher(1)
    publisher.append(0, {"n": 0})
    messages = await read_all(publisher, caplog, logging.DEBUG)
    assert any("a request from '_first' ended after" in message for message in messages)
    caplog.clear()
    assert not any(
        "a request from" in text for text in await read_all(publisher, caplog, logging.INFO)
    )


async def test_a_rediscovery_says_why(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="feedapi_client")
    publisher.append(0, {"n": 0})
    async with consume(publisher) as consumer, anyio.create_task_group() as tasks:

        async def handle(_: object) -> None:
            """Do nothing."""

        tasks.start_soon(consumer.run, handle)
        with anyio.fail_after(60):
            while "because Limits.discovery_interval is over" not in caplog.text:  # noqa: ASYNC110
                await anyio.sleep(0.002)
        tasks.cancel_scope.cancel()


def test_importing_the_library_adds_no_handler() -> None:
    assert logging.getLogger("feedapi_client").handlers == []


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("feedapi_client") and record.levelno >= logging.ERROR
    ]


async def test_every_end_by_an_error_is_one_record_even_if_nobody_waits_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = Publisher(2)
    publisher.append(0, {"n": 0})
    retry = RetryPolicy(base_delay=0.001, max_delay=0.002, refused_for=0.0)
    async with (
        asgi_client(publisher) as http,
        FeedConsumer(FEED, http=http, limits=limits(), retry=retry) as consumer,
    ):
        publisher.fail(401, on="any", times=None)
        async with anyio.create_task_group() as tasks:

            async def consume_in_background() -> None:
                with pytest.raises(FeedError):
                    await consumer.run(nothing)

            tasks.start_soon(consume_in_background)
        (ended,) = errors_of(caplog)
        assert "401" in ended
        assert "ends the iteration" in ended
        caplog.clear()
        with pytest.raises(FeedError):  # the next iteration can't even begin
            await consumer.run(nothing)
        assert len(errors_of(caplog)) == 1


async def test_a_consumer_that_is_replaced_logs_one_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = Publisher(1)
    publisher.append(0, {"n": 0})
    store = MemoryCursorStore()
    async with (
        asgi_client(publisher) as http,
        FeedConsumer(FEED, http=http, limits=limits(), store=store) as consumer,
    ):

        async def replaced(batch: Batch) -> None:
            await store.replace(consumer.key, await store.load(consumer.key))

        with pytest.raises(FencedError):
            await consumer.run(replaced)
    assert len(errors_of(caplog)) == 1


async def nothing(batch: Batch) -> None: ...


async def test_the_first_start_of_a_feed_with_history_names_no_transfer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = Publisher(2)
    publisher.append(0, {"n": 0})
    publisher.split(0, 2, method="cursor-from")
    publisher.split(1, 2, method="cursor-from")
    messages = await read_all(publisher, caplog, logging.INFO)
    assert not [text for text in messages if "transferred" in text]


async def test_a_transfer_names_only_those_that_take_the_cursor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="feedapi_client")
    publisher = Publisher(2)
    publisher.append(0, {"n": 0})
    publisher.append(1, {"n": 1})
    store = MemoryCursorStore()
    for _ in range(2):
        async with (
            asgi_client(publisher) as http,
            FeedConsumer(FEED, http=http, follow=False, limits=limits(), store=store) as consumer,
        ):
            await read(consumer)
        if 1 in publisher.open_partitions() and 0 in publisher.open_partitions():
            new = publisher.split(0, 2, method="cursor-from")
    (text,) = [r.getMessage() for r in caplog.records if "transferred" in r.getMessage()]
    assert f"partition 0 was transferred to partitions {new[0]}, {new[1]}" in text
