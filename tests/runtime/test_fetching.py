"""`Fetching`: one request of a partition, and what follows from it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest
from feedapi_client.runtime.driver import Driver

from feedapi_client import FeedClient, FeedUnavailableError, Limits
from feedapi_client.lineage.planner import Start, Stop
from feedapi_client.runtime.fetching import UNWINDING_SECONDS, Fetching
from feedapi_client.runtime.partition import RuntimePartition
from tests.consumer.helpers import RecordingStore
from tests.runtime.helpers import RETRY, URL, driver_of, safety_limit

pytestmark = pytest.mark.anyio

Body = AsyncIterator[bytes]
EVENT = b'{"event":{"n":1}}\n'


class Stream(httpx.AsyncByteStream):
    """A response's body, made while it is read."""

    def __init__(self, pieces: Body) -> None:
        self._pieces = pieces

    def __aiter__(self) -> Body:
        return self._pieces


@asynccontextmanager
async def fetching(
    driver: Driver, answer: Callable[[httpx.Request], httpx.Response]
) -> AsyncIterator[Fetching]:
    async with (
        httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http,
        FeedClient(URL, http=http, retry=RETRY) as client,
    ):
        yield Fetching(driver, client)


async def started(driver: Driver, id: int = 0) -> RuntimePartition:
    """A partition as the scheduler gives it to `Fetching.work`."""
    await driver.apply([Start(id, "_first")])
    partition = driver.partition(id)
    driver.scheduler.forget(partition)
    return partition


async def test_a_page_is_pending_and_the_next_one_is_asked_for() -> None:
    driver = driver_of(RecordingStore())
    partition = await started(driver)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=EVENT + b'{"cursor":"a"}\n')

    async with fetching(driver, answer) as fetches:
        await fetches.work(partition)
    assert not partition.fetching
    assert [batch.cursor for batch in partition.pending] == ["a"]
    assert driver.next_ready() is partition
    assert driver.scheduler.is_scheduled(partition)


async def test_r16_small_events_fill_a_batch_up_to_its_bytes_on_the_wire() -> None:
    """Not up to the memory that they take, which is several times as much."""
    page = 20 * EVENT + b'{"cursor":"a"}\n'
    driver = driver_of(RecordingStore(), limits=Limits(max_batch_bytes=len(page) + 1))
    partition = await started(driver)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=page)

    async with fetching(driver, answer) as fetches:
        with safety_limit():
            await fetches.work(partition)
    assert partition.pending_size == len(20 * EVENT) < driver.limits.max_batch_bytes
    assert partition.pending_bytes > driver.limits.max_batch_bytes
    assert driver.scheduler.is_scheduled(partition)
    partition.take(driver.limits.max_batch_bytes)
    assert partition.pending_size == partition.pending_bytes == 0


async def test_r14_after_an_error_and_a_request_that_gave_its_slot_back_it_is_read_on() -> None:
    driver = driver_of(RecordingStore())
    partition = await started(driver)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=EVENT + b'{"cursor":"a"}\n')

    async with fetching(driver, answer) as fetches:
        await fetches.work(partition)
        driver.scheduler.forget(partition)
        partition.failures.show(FeedUnavailableError("a failure before"))
        partition.take(driver.limits.max_batch_bytes)
        fetches.resume(partition)
        assert driver.scheduler.is_scheduled(partition)


async def test_r18_a_partition_that_is_parked_is_not_read_on() -> None:
    driver = driver_of(RecordingStore())
    partition = await started(driver)
    driver.planner.fail(partition.id, FeedUnavailableError("no more"))
    async with fetching(driver, lambda request: httpx.Response(200)) as fetches:
        fetches.resume(partition)
    assert not driver.scheduler.is_scheduled(partition)


async def test_r20_a_cancelled_request_is_over_and_keeps_what_was_checkpointed() -> None:
    driver = driver_of(RecordingStore())
    partition = await started(driver)
    hangs = anyio.Event()

    async def body() -> Body:
        yield EVENT + b'{"cursor":"a"}\n' + EVENT
        hangs.set()
        await anyio.sleep_forever()

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Stream(body()))

    async with fetching(driver, answer) as fetches:
        with safety_limit():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fetches.work, partition)
                await hangs.wait()
                assert partition.fetching
                tasks.cancel_scope.cancel()
    assert not partition.fetching
    assert partition.pending_bytes == driver.buffer.used
    assert driver.buffer.reserved == 0
    assert partition.read_cursor == "a"


async def test_a_partition_whose_cancelled_request_is_not_over_is_looked_at_again() -> None:
    driver = driver_of(RecordingStore())
    partition = await started(driver)

    def answer(request: httpx.Request) -> httpx.Response:
        raise AssertionError("a second request of the partition")

    async with fetching(driver, answer) as fetches:
        scope = anyio.CancelScope()
        partition.begin_request(scope)
        await fetches.work(partition)
    assert partition.fetching
    assert driver.scheduler.is_scheduled(partition)
    assert UNWINDING_SECONDS > 0, "a pause, not a busy loop"


@pytest.mark.parametrize(
    ("status", "content"),
    [(200, b'{"cursor":"_first"}\n'), (200, EVENT), (200, b"not the protocol\n"), (503, b"")],
    ids=["end", "no progress", "torn", "unavailable"],
)
async def test_the_result_of_a_cancelled_request_is_ignored(status: int, content: bytes) -> None:
    """Its last bytes may be there before the cancellation is delivered, and the partition started
    anew meanwhile."""
    driver = driver_of(RecordingStore())
    partition = await started(driver)

    async def body() -> Body:
        partition.stop()
        partition.start("later")
        yield content

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, stream=Stream(body()))

    async with fetching(driver, answer) as fetches:
        await fetches.work(partition)
    assert not partition.fetching
    assert partition.started
    assert (partition.end, partition.error, partition.failures.attempts) == (None, None, 0)
    assert partition.read_cursor == "later"
    assert not driver.scheduler.is_scheduled(partition), "whoever started it has scheduled it"


async def test_a_partition_that_was_stopped_asks_nothing() -> None:
    driver = driver_of(RecordingStore())
    partition = await started(driver)
    await driver.apply([Stop(0)])

    def answer(request: httpx.Request) -> httpx.Response:
        raise AssertionError("a request of a stopped partition")

    async with fetching(driver, answer) as fetches:
        await fetches.work(partition)


async def test_r14_a_failed_request_is_scheduled_again_and_shown() -> None:
    driver = driver_of(RecordingStore())
    partition = await started(driver)

    async with fetching(driver, lambda request: httpx.Response(503)) as fetches:
        await fetches.work(partition)
    assert partition.failing
    assert driver.scheduler.is_scheduled(partition)
    assert driver.failure is None


async def test_a_partition_that_is_to_be_stopped_is_not_asked_any_more() -> None:
    """What stops it may have to wait for the application to come back from its handler."""
    driver = driver_of(RecordingStore())
    partition = await started(driver)
    driver.defer(driver.planner.fail(0, FeedUnavailableError("lost")))
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(204)

    async with fetching(driver, answer) as work:
        assert await work.work(partition) is None
    assert asked == []
    assert partition.started
