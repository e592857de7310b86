"""What the log says: decisions at INFO, each record with its fields."""

from __future__ import annotations

import logging

import anyio
import pytest

from feedapi_client import Batch, FeedError, FencedError, RetryPolicy
from tests.consumer.helpers import LocalFeed, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

FEED = "http://feed/feed"


def one_event(partitions: int = 1) -> LocalFeed:
    feed = LocalFeed(partitions)
    feed.numbers(0, 0)
    return feed


async def read_all(feed: LocalFeed, caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    """Read a feed to its end, and return the messages of at least this level."""
    caplog.set_level(level, logger="feedapi_client")
    await feed.read()
    ours = [record for record in caplog.records if record.name.startswith("feedapi_client")]
    for record in ours:
        assert vars(record)["feed"] == FEED
        assert record.name.count(".") >= 1, "the logger of a module"
        assert record.levelno >= logging.DEBUG
    return [record.getMessage() for record in ours if record.levelno >= level]


async def test_decisions_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    feed = one_event()
    feed.split(0, 2, method="starts-after")
    text = "\n".join(await read_all(feed, caplog, logging.INFO))
    assert "dialect v2" in text
    assert "3 partitions listed, 1 read: 0 from cursor" in text or "0 from '_first'" in text
    assert "partition 0: drained, committed up to" in text
    assert "partition 1: read from cursor '_first'" in text
    assert "partition 2: read from cursor '_first'" in text


async def test_a_new_topology_and_a_transfer_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="feedapi_client")
    feed = one_event()
    async with feed.running() as reader:
        await reader.until("caught up")
        feed.split(0, 2, method="cursor-from")
        await wait_until(lambda: "transferred" in caplog.text)
    assert "the topology has changed; new: partitions 1, 2" in caplog.text
    assert "the cursor of partition 0 was transferred to its successors" in caplog.text


def test_importing_the_library_adds_no_handler() -> None:
    assert logging.getLogger("feedapi_client").handlers == []


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name.startswith("feedapi_client")]
    return [record.getMessage() for record in ours if record.levelno >= logging.ERROR]


async def nothing(batch: Batch) -> None: ...


async def test_every_end_by_an_error_is_one_record_even_if_nobody_waits_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    feed, retry = one_event(2), RetryPolicy(base_delay=0.001, max_delay=0.002, refused_for=0.0)
    async with feed.consume(retry=retry) as consumer:
        feed.fail(401, on="any", times=None)

        async def consume_in_background() -> None:
            with pytest.raises(FeedError):
                await consumer.run(nothing)

        async with anyio.create_task_group() as tasks:
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
    feed = one_event()
    async with feed.consume() as consumer:

        async def replaced(_: Batch) -> None:
            await feed.store.replace(consumer.key, await feed.store.load(consumer.key))

        with pytest.raises(FencedError):
            await consumer.run(replaced)
    assert len(errors_of(caplog)) == 1


async def test_the_first_start_of_a_feed_with_history_names_no_transfer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    feed = one_event(2)
    feed.split(0, 2, method="cursor-from")
    feed.split(1, 2, method="cursor-from")
    messages = await read_all(feed, caplog, logging.INFO)
    assert not [text for text in messages if "transferred" in text]
