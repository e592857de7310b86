"""Events, batches and handlers: the three ways to consume, the block around them, their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest

from feedapi_client import Batch, FeedConsumer, FetchOptions, NegotiationError
from feedapi_client.testing import Publisher, faults
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    LocalFeed,
    RecordingStore,
    consume,
    n_of,
    numbers,
    read_n,
    take,
    wait_until,
)
from tests.consumer.script import Step, do, play

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]
on_a_socket = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
SMALL = {"max_batch_bytes": 1}


@pytest.mark.parametrize("dialect", ["v1", "v2-draft", "v2-token"])
@pytest.mark.parametrize("way", ["events", "batches", "run"])
async def test_each_way_reads_every_event_in_each_dialect(way: str, dialect: Any) -> None:
    feed, events = LocalFeed(3, dialect=dialect, page_size=7, checkpoint_every=3), []
    feed.fill(0, 100, entities=9)

    async def handle(batch: Batch) -> None:
        assert all(event.partition == batch.partition for event in batch.events)
        events.extend(batch.events)

    async with feed.consume(follow=False, v1_partitions=3) as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            if way == "run":
                await consumer.run(handle)
            elif way == "events":
                events += [event async for event in consumer]
            else:
                async for batch in consumer.batches():
                    await handle(batch)
                    await batch.commit()
                    assert (await feed.store.cursors())[batch.partition] == batch.cursor
    feed.check(events)
    assert {event.partition for event in events} == {0, 1, 2}


NOT_OPEN = RuntimeError, "async with"
FIVE = do.set(page_size=5), do.numbers(0, *range(20))
ROUNDS = [step for n in range(4) for step in (do.numbers(0, n), do.again(), do.ends(n))]
STEPS: dict[str, list[Step]] = {
    "a consumer that follows gets what is published later": [
        *(do.open(), do.numbers(0, 0), do.takes(0), do.numbers(0, 1), do.takes(1)),
    ],
    "a loop left early begins again with the uncommitted batch": [
        *(do.numbers(0, *range(20)), do.open(follow=False), do.takes(0, 1, 2)),
        *(do.again(), do.ends(*range(20))),
    ],
    "batches left early begin again behind the last commit": [
        *(*FIVE, do.open(follow=False, limit=SMALL), do.delivers("first", *range(5))),
        *(do.commits("first"), do.again(), do.ends(*range(5, 20))),
    ],
    "a new iteration ends the one before": [
        *(do.numbers(0, 1), do.open(), do.takes(1), do.keep("first"), do.again(), do.takes(1)),
        do.is_over("first"),
    ],
    "an ended iteration stays ended": [
        *(do.numbers(0, 1), do.open(follow=False), do.ends(1), do.ends()),
    ],
    "the same consumer reads on from iteration to iteration": [do.open(follow=False), *ROUNDS],
    "a consumer is not entered twice at a time": [
        *(do.open(), do.raises(RuntimeError, "open already", do.enters_again())),
        *(do.numbers(0, 1), do.takes(1)),
    ],
    "a consumer can be entered again after it was left": [
        *(do.open(follow=False), do.numbers(0, 0), do.ends(0), do.leave()),
        *(do.enters_again(), do.numbers(0, 1), do.again(), do.ends(1)),
    ],
    "a consumer whose entry failed can be entered again": [
        *(do.numbers(0, 1), do.fail(404, on="discovery"), do.consumer_is_made()),
        *(do.raises(NegotiationError, "404", do.enters_again()), do.enters_again(), do.takes(1)),
    ],
    "a consumer that is not open can't be used": [
        *(
            do.consumer_is_made(),
            do.raises(*NOT_OPEN, do.takes(0)),
            do.raises(*NOT_OPEN, do.runs()),
        ),
        *(do.open(), do.leave(), do.again(), do.raises(*NOT_OPEN, do.delivers("none"))),
    ],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
async def test_iterations_and_the_block_around_them(steps: list[Step]) -> None:
    await play(*steps)


# ---------------------------------------------------------------------- what is delivered


async def test_payloads_are_delivered_byte_for_byte_and_by_the_callers_decoder() -> None:
    feed = LocalFeed()
    payloads = [
        b'{"entity": "a",  "n":1.50, "t":"\\u00e9\xe2\x80\xa8\xc2\x85"}',
        b'"a string \\n"',
        b'{"big":123456789012345678901234567890}',
    ]
    feed.extend(0, payloads)
    events = await feed.read_events(decoder=len)
    assert [event.raw for event in events] == payloads
    assert [event.json() for event in events] == [len(each) for each in payloads]


async def test_v1_headers_reach_the_event() -> None:
    feed, fetch = LocalFeed(dialect="v1"), FetchOptions(v1_headers=["trace"])
    feed.append(0, {"entity": "a", "n": 1}, headers={"trace": "t1", "other": "o"})
    (event,) = await feed.read_events(v1_partitions=1, fetch=fetch)
    assert event.headers == {"trace": "t1"}


# ---------------------------------------------------------------------- how it ends


async def test_stop_ends_an_iteration_that_waits() -> None:
    feed = LocalFeed()
    feed.consume().stop()  # is harmless before
    feed.numbers(0, 1)
    async with feed.open() as reader, anyio.create_task_group() as tasks:
        await reader.take()

        async def stop() -> None:
            await reader.until("caught up")
            reader.consumer.stop()

        tasks.start_soon(stop)
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(StopAsyncIteration):
            await anext(reader.events)


async def test_the_batch_in_flight_at_stop_is_committed_by_async_for() -> None:
    feed = LocalFeed()
    end = feed.numbers(0, 0)
    async with feed.consume() as consumer:
        async for _event in consumer:
            consumer.stop()
    assert await feed.store.cursors() == {0: end}


async def test_an_exception_of_a_handler_is_raised_by_run_and_cancels_the_others() -> None:
    feed, started, cancelled = LocalFeed(2), anyio.Event(), []
    feed.numbers(0, 0)
    feed.numbers(1, 1)

    async def handle(batch: Batch) -> None:
        if not batch.events:
            return
        if batch.partition == 1:
            await started.wait()
            raise ZeroDivisionError("of a handler")
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(batch.partition)

    async with feed.open(follow=False) as reader:
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(ZeroDivisionError, match="of a handler"):
            await reader.consumer.run(handle)
        assert cancelled == [0]
        assert sorted(await read_n(reader.consumer)) == [0, 1]  # from what is committed


async def test_cancelling_run_cancels_the_handlers() -> None:
    feed, started, cancelled = LocalFeed(), anyio.Event(), []
    feed.numbers(0, 0, 1, 2)

    async def handle(batch: Batch) -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(n_of(batch.events))

    async with feed.running(handle):
        await started.wait()
    assert cancelled == [[0, 1, 2]]
    assert await feed.store.cursors() == {0: "_first"}


async def test_run_handles_at_most_max_concurrency_batches_at_once() -> None:
    feed, running, most, two_at_once = LocalFeed(6), 0, 0, anyio.Event()
    for partition in range(6):
        feed.numbers(partition, partition)

    async def handle(batch: Batch) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if most == 2:
            two_at_once.set()
        await two_at_once.wait()
        await anyio.sleep(0.001)  # a third one would begin now
        running -= 1

    async with feed.consume(follow=False) as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            await consumer.run(handle, max_concurrency=2)
    assert most == 2


@pytest.mark.parametrize("anyio_backend", ["asyncio"], indirect=True)
async def test_native_cancellation_of_an_asyncio_task_ends_the_consumer() -> None:
    feed = LocalFeed()

    async def work() -> None:
        async with feed.consume() as consumer:
            async for _ in consumer:
                pass

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await work()
    task = asyncio.create_task(work())
    await wait_until(lambda: feed.counters["fetch"] > 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    current = asyncio.current_task()
    assert current is not None
    assert not current.cancelling()


@on_a_socket
async def test_cancelling_while_entering_leaves_nothing_behind(
    publisher: Publisher, store: RecordingStore
) -> None:
    publisher.fail(faults.Hang(), on="discovery")

    async def enter() -> None:
        async with consume(publisher, store=store):
            raise AssertionError("discovery hangs")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(enter)
        await wait_until(lambda: publisher.in_flight == 1)
        tasks.cancel_scope.cancel()
    await wait_until(lambda: publisher.in_flight == 0)
    assert store.saves == []


# --------------------------------------------------------------------- the HTTP client, options


@on_a_socket
async def test_the_callers_http_client_is_used_and_stays_open(publisher: Publisher) -> None:
    publisher.bearer = "sesame"
    numbers(publisher, 0, [1])
    async with httpx.AsyncClient(headers={"authorization": "Bearer sesame"}) as http:
        async with consume(publisher, follow=False, http=http) as consumer:
            assert await read_n(consumer) == [1]
        assert not http.is_closed


@on_a_socket
async def test_leaving_the_block_closes_every_connection(serve: Callable[..., Publisher]) -> None:
    publisher = serve(4, dialect="v2-draft", stream=True)
    async with consume(publisher, fetch=FetchOptions(stream=True)) as consumer:
        for partition in range(4):
            numbers(publisher, partition, [partition])
        await take(aiter(consumer), 4)
        await wait_until(lambda: publisher.in_flight == 4)
    await wait_until(lambda: publisher.in_flight == 0)


@on_a_socket
async def test_the_repr_of_a_consumer_shows_its_state_and_no_secret(publisher: Publisher) -> None:
    assert publisher.url is not None
    url = publisher.url.replace("http://", "http://user:hunter2@") + "?key=verysecret"
    async with FeedConsumer(url, follow=False) as consumer:
        shown = repr(consumer)
    assert "hunter2" not in shown
    assert "verysecret" not in shown
    assert "1 reading" in shown
