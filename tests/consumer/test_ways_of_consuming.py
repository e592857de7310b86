"""Events, batches and handlers: the three ways to consume, the block around them, their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
import httpx
import pytest

from feedapi_client import Batch, FeedConsumer, NegotiationError
from feedapi_client.testing import Publisher, faults
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    RecordingStore,
    assert_each_entity_in_order_and_once,
    consume,
    fill,
    n_of,
    next_batch,
    nothing_comes,
    numbers,
    read,
    read_n,
    take,
    wait_until,
)

pytestmark = pytest.mark.anyio

DIALECTS = ["v1", "v2-draft", "v2-token"]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_async_for_reads_every_event_in_each_dialect(
    serve: Callable[..., Publisher], dialect: str
) -> None:
    publisher = serve(3, dialect=dialect, page_size=7, checkpoint_every=3)
    fill(publisher, 100, entities=9)
    async with consume(publisher, follow=False, v1_partitions=3) as consumer:
        events = await read(consumer)
    assert_each_entity_in_order_and_once([event.json() for event in events], publisher)
    assert {event.partition for event in events} == {0, 1, 2}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_batches_reads_every_event_in_each_dialect(
    serve: Callable[..., Publisher], dialect: str, store: RecordingStore
) -> None:
    publisher = serve(3, dialect=dialect, page_size=7, checkpoint_every=3)
    fill(publisher, 100, entities=9)
    payloads = []
    async with consume(publisher, follow=False, v1_partitions=3, store=store) as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            async for batch in consumer.batches():
                assert all(event.partition == batch.partition for event in batch.events)
                payloads += [event.json() for event in batch.events]
                await batch.commit()
                assert (await store.cursors())[batch.partition] == batch.cursor
    assert_each_entity_in_order_and_once(payloads, publisher)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_run_calls_the_handler_with_every_batch_in_each_dialect(
    serve: Callable[..., Publisher], dialect: str
) -> None:
    publisher = serve(3, dialect=dialect, page_size=7, checkpoint_every=3)
    fill(publisher, 100, entities=9)
    payloads = []

    async def handle(batch: Batch) -> None:
        payloads.extend([event.json() for event in batch.events])

    async with consume(publisher, follow=False, v1_partitions=3) as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            await consumer.run(handle)
    assert_each_entity_in_order_and_once(payloads, publisher)


async def test_a_consumer_that_follows_gets_what_is_published_later(publisher: Publisher) -> None:
    async with consume(publisher) as consumer:
        events = aiter(consumer)
        for n in range(5):
            numbers(publisher, 0, [n])
            assert n_of(await take(events)) == [n]


async def test_payloads_are_delivered_byte_for_byte(publisher: Publisher) -> None:
    payloads = [
        b'{"entity": "a",  "n":1.50, "t":"\\u00e9\xe2\x80\xa8\xc2\x85"}',
        b'"a string \\n"',
        b'{"big":123456789012345678901234567890}',
    ]
    publisher.extend(0, payloads)
    async with consume(publisher, follow=False) as consumer:
        assert [event.raw for event in await read(consumer)] == payloads


async def test_v1_headers_reach_the_event(serve: Callable[..., Publisher]) -> None:
    from feedapi_client import FetchOptions

    publisher = serve(dialect="v1")
    publisher.append(0, {"entity": "a", "n": 1}, headers={"trace": "t1", "other": "o"})
    async with consume(
        publisher, follow=False, v1_partitions=1, fetch=FetchOptions(v1_headers=["trace"])
    ) as consumer:
        assert [event.headers for event in await read(consumer)] == [{"trace": "t1"}]


async def test_the_callers_decoder_decodes_payloads(publisher: Publisher) -> None:
    numbers(publisher, 0, [1])
    async with consume(publisher, follow=False, decoder=len) as consumer:
        (event,) = await read(consumer)
        assert event.json() == len(event.raw)


async def test_leaving_async_for_early_and_beginning_again_repeats_the_uncommitted_batch(
    publisher: Publisher,
) -> None:
    numbers(publisher, 0, range(20))
    async with consume(publisher, follow=False) as consumer:
        seen = []
        async for event in consumer:
            seen.append(event.json()["n"])
            if len(seen) == 3:
                break
        assert await read_n(consumer) == list(range(20))


async def test_leaving_batches_early_and_beginning_again_goes_on_behind_the_last_commit(
    publisher: Publisher,
) -> None:
    publisher.page_size = 5
    numbers(publisher, 0, range(20))
    async with consume(publisher, follow=False, limit={"max_batch_bytes": 1}) as consumer:
        first = None
        async for batch in consumer.batches():
            first = batch
            await batch.commit()
            break
        assert first is not None
        assert n_of(first.events) + await read_n(consumer) == list(range(20))


async def test_leaving_run_by_stop_commits_what_was_handled(
    publisher: Publisher, store: RecordingStore
) -> None:
    publisher.page_size = 5
    numbers(publisher, 0, range(20))
    async with consume(publisher, limit={"max_batch_bytes": 1}, store=store) as consumer:
        handled = []

        async def handle(batch: Batch) -> None:
            handled.extend(n_of(batch.events))
            consumer.stop()

        with anyio.fail_after(SAFETY_LIMIT):
            await consumer.run(handle)
    async with consume(publisher, follow=False, store=store) as consumer:
        rest = await read_n(consumer)
    assert handled
    assert handled + rest == list(range(20))


async def test_stop_ends_an_iteration_that_waits(publisher: Publisher) -> None:
    async with consume(publisher) as consumer, anyio.create_task_group() as tasks:
        events = aiter(consumer)
        numbers(publisher, 0, [1])
        await take(events)

        async def stop() -> None:
            await wait_until(lambda: consumer.status()[0].state == "caught up")
            consumer.stop()

        tasks.start_soon(stop)
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_stop_before_an_iteration_is_harmless(publisher: Publisher) -> None:
    consumer = consume(publisher)
    consumer.stop()


async def test_the_batch_in_flight_at_stop_is_committed_by_async_for(
    publisher: Publisher, store: RecordingStore
) -> None:
    end = numbers(publisher, 0, [0])
    async with consume(publisher, store=store) as consumer:
        async for _event in consumer:
            consumer.stop()
    assert await store.cursors() == {0: end}


async def test_an_ended_iteration_stays_ended(publisher: Publisher) -> None:
    numbers(publisher, 0, [1])
    async with consume(publisher, follow=False) as consumer:
        batches = consumer.batches()
        while True:
            try:
                await (await anext(batches)).commit()
            except StopAsyncIteration:
                break
        with pytest.raises(StopAsyncIteration):
            await anext(batches)


async def test_a_new_iteration_ends_the_one_before(publisher: Publisher) -> None:
    numbers(publisher, 0, [1])
    async with consume(publisher) as consumer:
        first = aiter(consumer)
        assert n_of(await take(first)) == [1]
        assert n_of(await take(aiter(consumer))) == [1]
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises((StopAsyncIteration, Exception)):
            await anext(first)


async def test_the_same_consumer_reads_on_from_iteration_to_iteration(publisher: Publisher) -> None:
    async with consume(publisher, follow=False) as consumer:
        for round_ in range(4):
            numbers(publisher, 0, [round_])
            assert await read_n(consumer) == [round_]


async def test_a_consumer_is_not_entered_twice_at_a_time(publisher: Publisher) -> None:
    async with consume(publisher) as consumer:
        with pytest.raises(RuntimeError, match="open already"):
            await consumer.__aenter__()
        numbers(publisher, 0, [1])
        assert n_of(await take(aiter(consumer))) == [1]


async def test_a_consumer_can_be_entered_again_after_it_was_left(publisher: Publisher) -> None:
    consumer = consume(publisher, follow=False)
    for n in range(3):
        numbers(publisher, 0, [n])
        async with consumer:
            assert await read_n(consumer) == [n]


async def test_a_consumer_whose_entry_failed_can_be_entered_again(publisher: Publisher) -> None:
    numbers(publisher, 0, [1])
    publisher.fail(404, on="discovery")
    consumer = consume(publisher, follow=False)
    with pytest.raises(NegotiationError):
        await consumer.__aenter__()
    async with consumer:
        assert await read_n(consumer) == [1]


async def test_using_a_consumer_that_is_not_open_is_an_error(publisher: Publisher) -> None:
    consumer = consume(publisher)
    with pytest.raises(RuntimeError, match="async with"):
        await anext(aiter(consumer))
    with pytest.raises(RuntimeError, match="async with"):
        await consumer.run(lambda batch: anyio.sleep_forever())
    async with consumer:
        pass
    with pytest.raises(RuntimeError, match="async with"):
        await anext(consumer.batches())


async def test_the_callers_http_client_is_used_and_stays_open(publisher: Publisher) -> None:
    publisher.bearer = "sesame"
    numbers(publisher, 0, [1])
    async with httpx.AsyncClient(headers={"authorization": "Bearer sesame"}) as http:
        async with consume(publisher, follow=False, http=http) as consumer:
            assert await read_n(consumer) == [1]
        assert not http.is_closed


async def test_leaving_the_block_closes_every_connection(serve: Callable[..., Publisher]) -> None:
    from feedapi_client import FetchOptions

    publisher = serve(4, dialect="v2-draft", stream=True)
    async with consume(publisher, fetch=FetchOptions(stream=True)) as consumer:
        for partition in range(4):
            numbers(publisher, partition, [partition])
        await take(aiter(consumer), 4)
        await wait_until(lambda: publisher.in_flight == 4)
    await wait_until(lambda: publisher.in_flight == 0)


@pytest.mark.parametrize(
    "options",
    [
        {"on_error": "ignore"},
        {"name": ""},
        {"start": "middle"},
        {"v1_partitions": 0},
        {"v1_partitions": 40000},
    ],
)
async def test_invalid_options_are_refused_by_the_constructor(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        FeedConsumer("http://127.0.0.1:1/feed", **options)  # type: ignore[arg-type]


async def test_an_exception_in_the_loop_body_is_the_applications_own(publisher: Publisher) -> None:
    numbers(publisher, 0, range(3))

    async def work() -> None:
        async with consume(publisher) as consumer:
            async for event in consumer:
                event.json()["n"] // 0

    with pytest.raises(ZeroDivisionError):
        await work()


async def test_an_exception_of_a_handler_is_raised_by_run_and_cancels_the_others(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(2)
    numbers(publisher, 0, [0])
    numbers(publisher, 1, [1])
    cancelled = []

    async def handle(batch: Batch) -> None:
        if not batch.events:
            return
        if batch.partition == 1:
            await wait_until(lambda: started)
            raise ZeroDivisionError("of a handler")
        started.append(1)
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(batch.partition)

    started: list[int] = []
    async with consume(publisher) as consumer:
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(ZeroDivisionError, match="of a handler"):
            await consumer.run(handle)
    assert cancelled == [0]


async def test_after_a_handlers_exception_the_same_consumer_goes_on_from_what_is_committed(
    publisher: Publisher,
) -> None:
    numbers(publisher, 0, range(3))

    async def fail(batch: Batch) -> None:
        raise ZeroDivisionError

    async with consume(publisher, follow=False) as consumer:
        with pytest.raises(ZeroDivisionError):
            await consumer.run(fail)
        assert await read_n(consumer) == [0, 1, 2]


async def test_cancelling_run_cancels_the_handlers(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(3))
    started, cancelled = anyio.Event(), []

    async def handle(batch: Batch) -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(n_of(batch.events))

    async with consume(publisher, store=store) as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(consumer.run, handle)
                await started.wait()
                tasks.cancel_scope.cancel()
    assert cancelled == [[0, 1, 2]]
    assert await store.cursors() == {0: "_first"}


async def test_run_handles_at_most_max_concurrency_batches_at_once(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(6)
    for partition in range(6):
        numbers(publisher, partition, [partition])
    running, most = 0, 0
    two_at_once = anyio.Event()

    async def handle(batch: Batch) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if most == 2:
            two_at_once.set()
        await two_at_once.wait()
        await anyio.sleep(0.001)  # a third one would begin now
        running -= 1

    async with consume(publisher, follow=False) as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            await consumer.run(handle, max_concurrency=2)
    assert most == 2


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_native_cancellation_of_an_asyncio_task_ends_the_consumer(
    publisher: Publisher,
) -> None:

    async def work() -> None:
        async with consume(publisher) as consumer:
            async for _ in consumer:
                pass

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await work()
    task = asyncio.create_task(work())
    await wait_until(lambda: publisher.counters["fetch"] > 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    current = asyncio.current_task()
    assert current is not None
    assert not current.cancelling()


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


async def test_cancelling_while_waiting_for_the_next_batch_leaves_the_consumer_usable(
    publisher: Publisher,
) -> None:
    async with consume(publisher) as consumer:
        batches = consumer.batches()
        (empty,) = await take(batches)  # the cursor moved, without an event
        await empty.commit()
        async with nothing_comes(batches):
            await wait_until(lambda: consumer.status()[0].caught_up)
        numbers(publisher, 0, [7])
        assert n_of((await next_batch(batches)).events) == [7]


async def test_the_repr_of_a_consumer_shows_its_state_and_no_secret(publisher: Publisher) -> None:
    assert publisher.url is not None
    url = publisher.url.replace("http://", "http://user:hunter2@") + "?key=verysecret"
    async with FeedConsumer(url, follow=False) as consumer:
        shown = repr(consumer)
    assert "hunter2" not in shown
    assert "verysecret" not in shown
    assert "1 reading" in shown
