"""R14 retry, R15 poll and stream, R16 back-pressure, R18 errors of one partition, R19 secrets.

Also what `status()` shows, and how an iteration ends without `follow`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from typing import Any

import anyio
import httpx
import pytest

from feedapi_client import (
    AuthenticationError,
    Batch,
    FeedConsumer,
    FeedError,
    FeedUnavailableError,
    FetchOptions,
    NegotiationError,
    ProtocolError,
    RetryPolicy,
    TransportError,
)
from feedapi_client.http.redaction import redact_http_logs
from feedapi_client.status import PartitionState
from feedapi_client.testing import Publisher, faults
from tests.consumer.helpers import (
    BROKEN,
    SAFETY_LIMIT,
    SHORT,
    RecordingStore,
    assert_each_entity_in_order_and_once,
    consume,
    fill,
    last_fetch,
    limits,
    n_of,
    next_batch,
    nothing_comes,
    numbers,
    read,
    read_n,
    rediscovered,
    take,
    wait_until,
)

pytestmark = pytest.mark.anyio


# ---------------------------------------------------------------------- R14


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
async def test_r14_temporary_error_statuses_are_retried(publisher: Publisher, status: int) -> None:
    publisher.fail(status, times=4)
    numbers(publisher, 0, range(5))
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == list(range(5))


async def test_r14_a_page_that_breaks_the_protocol_is_not_asked_for_again(
    publisher: Publisher,
) -> None:
    publisher.fail(BROKEN, times=None)
    async with consume(publisher) as consumer:
        with pytest.raises(ProtocolError, match=r"partition 0: .*_last"):
            await take(aiter(consumer))
    assert publisher.counters["fetch"] == 1


async def test_r14_retry_after_is_honoured(publisher: Publisher) -> None:
    publisher.fail(faults.Status(503, headers={"retry-after": "0.3"}))
    numbers(publisher, 0, [0])
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == [0]
    first, second = [request.time for request in publisher.requests if request.kind == "fetch"][:2]
    assert second - first >= 0.3


async def test_r14_retry_after_as_a_date_is_honoured_within_its_bound(publisher: Publisher) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    publisher.fail(faults.Status(429, headers={"retry-after": date}))
    numbers(publisher, 0, [0])
    policy = RetryPolicy(base_delay=0.001, max_delay=0.001, max_retry_after=0.2)
    async with consume(publisher, follow=False, retry=policy) as consumer:
        assert await read_n(consumer) == [0]
    first, second = [request.time for request in publisher.requests if request.kind == "fetch"][:2]
    assert second - first >= 0.2


async def test_r14_the_callers_function_decides_what_is_retried(publisher: Publisher) -> None:
    asked: list[str] = []

    def decide(error: FeedError) -> Any:
        asked.append(type(error).__name__)
        return "retry" if isinstance(error, AuthenticationError) else "fatal"

    publisher.fail(401, times=3)
    numbers(publisher, 0, [0])
    async with consume(
        publisher, retry=RetryPolicy(base_delay=0.001, max_delay=0.001, decide=decide)
    ) as consumer:
        events = aiter(consumer)
        assert n_of(await take(events)) == [0]
        publisher.fail(503)
        with pytest.raises(FeedUnavailableError):
            await take(events)
    assert asked == ["AuthenticationError"] * 3 + ["FeedUnavailableError"]


async def test_r14_a_partition_that_never_recovers_is_given_up_after_its_time(
    publisher: Publisher,
) -> None:
    publisher.fail(503, times=None)
    async with consume(
        publisher, retry=RetryPolicy(base_delay=0.005, max_delay=0.01, give_up_after=0.1)
    ) as consumer:
        with pytest.raises(FeedUnavailableError, match="503"):
            await take(aiter(consumer))


async def test_r14_progress_resets_the_time_to_give_up(publisher: Publisher) -> None:
    """Each response breaks off after a checkpoint. That is slow progress, not a failure."""
    numbers(publisher, 0, range(100))
    publisher.fail(faults.Both((faults.Delay(0.02), faults.Truncate(after_lines=7))), times=None)
    async with consume(
        publisher, retry=RetryPolicy(base_delay=0.001, max_delay=0.001, give_up_after=0.15)
    ) as consumer:
        assert n_of(await take(aiter(consumer), 90)) == list(range(90))


@pytest.mark.parametrize(
    "fault",
    [
        faults.Hang(),
        faults.Hang(after_lines=2),
        faults.Status(503),
        faults.Reset(),
        faults.CutLine(),
    ],
    ids=repr,
)
async def test_r14_a_healthy_partition_never_waits_for_a_failing_one(
    serve: Callable[..., Publisher], fault: faults.Fault
) -> None:
    publisher = serve(3)
    numbers(publisher, 0, [1000])
    publisher.fail(fault, partition=0, times=None)
    hours = RetryPolicy(base_delay=36_000, max_delay=36_000)
    async with consume(publisher, retry=hours, limit={"request_timeout": 36_000}) as consumer:
        events = aiter(consumer)
        for n in range(10):
            numbers(publisher, 1 + n % 2, [n])
            assert n_of(await take(events)) == [n]


async def test_r14_a_request_that_hangs_is_timed_out_and_tried_again(publisher: Publisher) -> None:
    publisher.fail(faults.Hang())
    publisher.fail(faults.Hang(after_lines=2))
    numbers(publisher, 0, range(5))
    async with consume(publisher, follow=False, limit={"request_timeout": 0.5}) as consumer:
        assert await read_n(consumer) == list(range(5))


async def test_r14_a_publisher_that_restarts_is_found_again() -> None:
    publisher = Publisher()
    with publisher.serve() as url:
        port = int(url.split(":")[2].split("/")[0])
        consumer = consume(publisher)
        await consumer.__aenter__()
        events = aiter(consumer)
        numbers(publisher, 0, [0])
        await take(events)
    numbers(publisher, 0, [1])
    await wait_until(lambda: consumer.status()[0].state == "retrying")
    with publisher.serve(port=port):
        assert n_of(await take(events)) == [1]
        await consumer.__aexit__(None, None, None)


async def test_r14_a_redirect_to_another_origin_is_refused(publisher: Publisher) -> None:
    with Publisher().serve() as elsewhere:
        publisher.fail(faults.Redirect(elsewhere + "/events"), times=None)
        async with consume(publisher, retry=SHORT) as consumer:
            with pytest.raises(TransportError, match="another origin"):
                await take(aiter(consumer))
        publisher.fail(faults.Redirect(elsewhere), on="discovery", times=None)
        with pytest.raises((NegotiationError, TransportError), match="another origin"):
            await consume(publisher).__aenter__()


async def test_r14_trickling_and_compressed_responses_are_read(publisher: Publisher) -> None:
    publisher.fail(faults.Trickle(piece=7))
    publisher.fail(faults.Gzip(), times=2)
    numbers(publisher, 0, range(30))
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == list(range(30))


# ---------------------------------------------------------------------- R15


async def test_r15_the_poll_interval_doubles_and_falls_back_at_the_first_event(
    publisher: Publisher,
) -> None:
    limit = {"poll_interval": 0.005, "max_poll_interval": 3600, "discovery_interval": 3600}
    async with consume(publisher, limit=limit) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(_consume_all, consumer)
        await wait_until(lambda: publisher.counters["fetch"] >= 8)
        grown = _gaps(publisher)[1:]  # the first response moves the cursor
        numbers(publisher, 0, [1])
        publisher.clear_requests()
        # Without falling back these would take ten minutes.
        await wait_until(lambda: publisher.counters["fetch"] >= 10)
        tasks.cancel_scope.cancel()
    assert all(gap > 0.0045 * 2**n for n, gap in enumerate(grown))


async def test_r15_the_poll_interval_grows_no_further_than_its_maximum(
    publisher: Publisher,
) -> None:
    limit = {"poll_interval": 0.005, "max_poll_interval": 0.02, "discovery_interval": 3600}
    async with consume(publisher, limit=limit) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(_consume_all, consumer)
        # Without a maximum these would take an hour and more.
        await wait_until(lambda: publisher.counters["fetch"] >= 20)
        tasks.cancel_scope.cancel()
    assert all(gap > 0.018 for gap in _gaps(publisher)[3:])


async def _consume_all(consumer: FeedConsumer) -> None:
    async for _ in consumer:
        pass


def _gaps(publisher: Publisher) -> list[float]:
    times = [request.time for request in publisher.requests if request.kind == "fetch"]
    return [after - before for before, after in pairwise(times)]


@pytest.fixture
def streaming(serve: Callable[..., Publisher]) -> Publisher:
    return serve(1, dialect="v2-draft", stream=True, checkpoint_every=5)


@pytest.mark.parametrize("stream", [True, 3_600_000])
async def test_r15_a_stream_is_held_open_and_batches_are_delivered_as_they_arrive(
    streaming: Publisher, stream: bool | int
) -> None:
    async with consume(
        streaming, fetch=FetchOptions(stream=stream), limit={"discovery_interval": 3600}
    ) as consumer:
        events = aiter(consumer)
        for n in range(10):
            numbers(streaming, 0, [n])
            assert n_of(await take(events)) == [n]
    assert streaming.counters["fetch"] == 1
    assert last_fetch(streaming).stream == ("y" if stream is True else "3600000")


async def test_r15_stream_is_not_asked_for_where_the_feed_has_none(publisher: Publisher) -> None:
    numbers(publisher, 0, [1])
    async with consume(publisher, fetch=FetchOptions(stream=True)) as consumer:
        assert n_of(await take(aiter(consumer))) == [1]
    assert last_fetch(publisher).stream is None


async def test_r15_an_idle_stream_is_reopened_and_never_given_up(streaming: Publisher) -> None:
    """A feed without events is not an error, even for a long time."""
    policy = RetryPolicy(base_delay=0.01, max_delay=0.02, give_up_after=0.2)
    async with consume(
        streaming,
        fetch=FetchOptions(stream=True),
        retry=policy,
        limit={"stream_idle_timeout": 0.05},
    ) as consumer:
        events = aiter(consumer)
        numbers(streaming, 0, [0])
        await take(events)
        async with anyio.create_task_group() as tasks:
            found: list[int] = []

            async def wait_for_one() -> None:
                found.extend(n_of(await take(events)))

            tasks.start_soon(wait_for_one)
            await wait_until(lambda: streaming.counters["fetch"] >= 10)
            assert consumer.status()[0].state != "retrying"
            assert consumer.status()[0].error is None
            numbers(streaming, 0, [1])
        assert found == [1]


async def test_r15_a_stream_that_ends_is_followed_by_the_next_without_a_growing_pause(
    streaming: Publisher,
) -> None:
    limit = {"poll_interval": 0.02, "max_poll_interval": 3600, "discovery_interval": 3600}
    async with (
        consume(streaming, fetch=FetchOptions(stream=20), limit=limit) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(_consume_all, consumer)
        # With a pause that doubles these would take more than two minutes.
        await wait_until(lambda: streaming.counters["fetch"] >= 14)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
@pytest.mark.parametrize("dialect", ["v2-draft", "v2-token"])
async def test_r15_a_split_while_streaming(streaming: Publisher, dialect: str, method: str) -> None:
    streaming.upgrade(dialect)  # type: ignore[arg-type]
    fill(streaming, 10)
    async with consume(streaming, fetch=FetchOptions(stream=True)) as consumer:
        events = aiter(consumer)
        seen = await take(events, 10)
        streaming.split(0, method=method)  # type: ignore[arg-type]
        fill(streaming, 10, start=10)
        seen += await take(events, 10)
    assert_each_entity_in_order_and_once([event.json() for event in seen], streaming)


async def test_r15_a_new_token_while_streaming(streaming: Publisher) -> None:
    streaming.upgrade("v2-token")
    async with consume(streaming, fetch=FetchOptions(stream=True)) as consumer:
        events = aiter(consumer)
        for n in range(5):
            numbers(streaming, 0, [n])
            assert n_of(await take(events)) == [n]
            streaming.rotate_token()


async def test_r15_a_stream_of_a_closed_partition_is_ended_so_that_its_children_start(
    streaming: Publisher,
) -> None:
    numbers(streaming, 0, [0])
    streaming.fail(faults.Hang(after_bytes=1_000_000), times=None)
    async with consume(
        streaming, fetch=FetchOptions(stream=True), limit={"stream_idle_timeout": 3600}
    ) as consumer:
        events = aiter(consumer)
        assert n_of(await take(events)) == [0]
        streaming.split(0, 1)
        streaming.heal()
        numbers(streaming, 1, [1])
        assert n_of(await take(events)) == [1]


async def test_r15_streams_of_more_partitions_than_there_are_slots_take_turns(
    serve: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feedapi_client.runtime.request.SHARED_STREAM_MILLISECONDS", 20)
    publisher = serve(6, dialect="v2-draft", stream=True)
    async with consume(
        publisher, fetch=FetchOptions(stream=True), limit={"max_concurrent_fetches": 2}
    ) as consumer:
        events = aiter(consumer)
        for n in range(6):
            numbers(publisher, n, [n])
        assert sorted(n_of(await take(events, 6))) == list(range(6))
    assert publisher.max_in_flight <= 3


async def test_r15_without_follow_a_stream_feed_ends(streaming: Publisher) -> None:
    numbers(streaming, 0, range(10))
    async with consume(streaming, fetch=FetchOptions(stream=True), follow=False) as consumer:
        assert await read_n(consumer) == list(range(10))


# ---------------------------------------------------------------------- R16


async def test_r16_a_slow_application_stops_the_reading(serve: Callable[..., Publisher]) -> None:
    publisher = serve(8, page_size=1_000_000, checkpoint_every=10)
    for partition in range(8):
        publisher.extend(partition, [{"n": n, "text": "x" * 1000} for n in range(3000)])
    limit = {"max_buffered_bytes": 2_000_000, "max_line_bytes": 100_000}
    async with consume(publisher, limit=limit) as consumer:
        batches = consumer.batches()
        await take(batches)
        await wait_until(lambda: publisher.counters["fetch"] == 8)
        # No room for one more read: 64 KiB, and what their events take in memory.
        await wait_until(lambda: consumer.status().buffered_bytes > 2_000_000 - 80_000)
        await rediscovered(publisher, 5)
        most = consumer.status().buffered_bytes
        assert 2_000_000 - 80_000 < most <= 2_000_000
        assert publisher.counters["fetch"] == 8
        seen = 0
        with anyio.fail_after(SAFETY_LIMIT):
            while seen < 8 * 2900:
                seen += len((await anext(batches)).events)
                most = max(most, consumer.status().buffered_bytes)
    assert most <= 2_000_000


async def test_r16_the_buffer_stays_bounded_over_many_partitions(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(40, page_size=1_000_000, checkpoint_every=100)
    for partition in range(40):
        publisher.extend(partition, [{"n": n, "text": "x" * 500} for n in range(600)])
    most, count = 0, 0
    async with consume(
        publisher, follow=False, limit={"max_buffered_bytes": 1_000_000, "max_line_bytes": 100_000}
    ) as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            async for batch in consumer.batches():
                most = max(most, consumer.status().buffered_bytes)
                count += len(batch.events)
                await anyio.sleep(0.001)
                most = max(most, consumer.status().buffered_bytes)
                await batch.commit()
    assert count == 24_000
    assert most <= 1_000_000


async def test_r16_a_stream_that_the_application_does_not_read_is_not_buffered_without_end(
    streaming: Publisher,
) -> None:
    fetch = FetchOptions(stream=True)
    async with consume(
        streaming,
        fetch=fetch,
        limit={
            "max_buffered_bytes": 500_000,
            "max_line_bytes": 100_000,
            "max_batch_bytes": 100_000,
        },
    ) as consumer:
        batches = consumer.batches()
        numbers(streaming, 0, [0])
        await next_batch(batches)
        for _ in range(20):
            streaming.extend(0, [{"n": n, "text": "x" * 1000} for n in range(200)])
            await anyio.sleep(0.005)
            assert consumer.status().buffered_bytes <= 500_000
        seen = 0
        with anyio.fail_after(SAFETY_LIMIT):
            while seen < 4000:
                seen += len((await anext(batches)).events)


@pytest.mark.parametrize(
    "changed",
    [
        "max_batch_bytes",
        "max_concurrent_fetches",
        "max_buffered_bytes",
        "max_attempts_without_progress",
        "all",
    ],
)
async def test_r16_tiny_limits_lose_and_repeat_nothing(
    serve: Callable[..., Publisher], changed: str
) -> None:
    tiny = {
        "max_batch_bytes": 1,
        "max_concurrent_fetches": 1,
        "max_buffered_bytes": 200,
        "max_attempts_without_progress": 1,
    }
    limit = tiny if changed == "all" else {changed: tiny[changed]}
    publisher = serve(3, page_size=6, checkpoint_every=3)
    fill(publisher, 60)
    publisher.split(0)
    fill(publisher, 30, start=60)
    async with consume(publisher, follow=False, limit={"max_line_bytes": 200, **limit}) as consumer:
        assert_each_entity_in_order_and_once(
            [event.json() for event in await read(consumer)], publisher
        )


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_r16_hundreds_of_partitions_are_read_by_few_requests_at_once(
    serve: Callable[..., Publisher],
) -> None:
    count = 500
    publisher = serve(count)
    for partition in range(count):
        numbers(publisher, partition, [partition])
    # One discovery: repeated ones would cost more than the fetches.
    async with consume(publisher, follow=False, limit={"discovery_interval": 3600}) as consumer:
        seen = [event.json()["n"] async for event in consumer]
        status = consumer.status()
    assert sorted(seen) == list(range(count))
    assert len(status.partitions) == count
    assert status.events == count
    assert publisher.counters["fetch"] <= 2 * count
    assert publisher.max_in_flight <= 65


# ---------------------------------------------------------------------- R18


async def test_r18_raise_ends_the_iteration_and_loses_nothing(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(2)
    fill(publisher, 20)
    rule = publisher.fail(BROKEN, partition=0, times=None)
    seen: list[Any] = []

    async def work() -> None:
        async with consume(publisher, store=store) as consumer:
            async for batch in consumer.batches():
                seen.extend(event.json() for event in batch.events)
                await batch.commit()

    with pytest.raises(ProtocolError, match="partition 0"):
        await work()
    rule.remove()
    async with consume(publisher, store=store, follow=False) as consumer:
        seen += [event.json() for event in await read(consumer)]
    assert_each_entity_in_order_and_once(seen, publisher)


async def test_r18_park_stops_the_partition_and_its_descendants_and_the_others_go_on(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(2)
    numbers(publisher, 0, [0])
    publisher.split(0)
    publisher.split(2)
    publisher.fail(BROKEN, partition=0, times=None)
    before = datetime.now(UTC)
    async with consume(publisher, on_error="park") as consumer:
        events = aiter(consumer)
        for n in range(3):
            numbers(publisher, 1, [n])
            assert n_of(await take(events)) == [n]
        await wait_until(lambda: consumer.status()[0].state == "parked")
        status = consumer.status()
    for partition in (0, 2, 3, 4, 5):
        parked = status[partition]
        assert parked.state == "parked"
        assert parked.error is not None
        assert "partition 0" in parked.error
        assert "_last" in parked.error
        assert parked.since is not None
        assert before <= parked.since <= datetime.now(UTC)
    assert status[1].error is None
    assert status[1].since is None


async def test_r18_park_without_follow_ends_when_the_others_are_at_their_end(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(3)
    for partition in range(3):
        numbers(publisher, partition, [partition])
    publisher.fail(BROKEN, partition=0, times=None)
    async with consume(publisher, on_error="park", follow=False) as consumer:
        assert sorted(await read_n(consumer)) == [1, 2]
        assert consumer.status()[0].state == "parked"


@pytest.mark.parametrize("late", [False, True])
async def test_r18_a_lost_partition_is_parked_too(
    publisher: Publisher, store: RecordingStore, late: bool
) -> None:
    async with consume(publisher, store=store):
        pass
    if not late:
        publisher.add(5, starts_after=4)
    async with consume(publisher, store=store, on_error="park") as consumer:
        events = aiter(consumer)
        numbers(publisher, 0, [0])
        assert n_of(await take(events)) == [0]
        if late:
            publisher.add(5, starts_after=4)
        numbers(publisher, 0, [1])
        assert n_of(await take(events)) == [1]
        await wait_until(lambda: 5 in consumer.status().partitions)
        status = consumer.status()[5]
    assert status.state == "parked"
    assert status.error is not None
    assert "partition 4" in status.error
    assert status.since is not None


async def test_r18_a_split_of_a_parked_partition_is_parked(publisher: Publisher) -> None:
    numbers(publisher, 0, [0])
    publisher.fail(BROKEN, partition=0, times=None)
    publisher.add(1)
    async with consume(publisher, on_error="park") as consumer:
        events = aiter(consumer)
        numbers(publisher, 1, [1])
        await take(events)
        await wait_until(lambda: consumer.status()[0].state == "parked")
        successors = publisher.split(0, method="cursor-from")
        await wait_until(lambda: consumer.status().partitions.get(successors[0]) is not None)
        numbers(publisher, 1, [2])
        assert n_of(await take(events)) == [2]
        assert [consumer.status()[id].state for id in successors] == ["parked", "parked"]


async def test_r18_a_new_iteration_tries_a_parked_partition_again(publisher: Publisher) -> None:
    numbers(publisher, 0, [0])
    publisher.fail(BROKEN, partition=0)
    async with consume(publisher, on_error="park", follow=False) as consumer:
        assert await read_n(consumer) == []
        assert await read_n(consumer) == [0]


async def test_r18_fencing_is_not_parked(publisher: Publisher, store: RecordingStore) -> None:
    from feedapi_client import FencedError

    numbers(publisher, 0, [0])
    async with consume(publisher, store=store, on_error="park") as consumer:
        batch = await next_batch(consumer.batches())
        await store.replace(consumer.key, {})
        async with consume(publisher, store=store, follow=False) as rival:
            await read_n(rival)
        with pytest.raises(FencedError):
            await batch.commit()


async def test_r18_a_batch_in_flight_of_a_parked_partition_can_be_committed(
    publisher: Publisher, store: RecordingStore
) -> None:
    publisher.add(1)
    numbers(publisher, 0, [0])
    async with consume(publisher, store=store, on_error="park") as consumer:
        batch = await next_batch(consumer.batches())
        publisher.fail(BROKEN, partition=0, times=None)
        await wait_until(lambda: consumer.status()[0].state == "parked")
        await batch.commit()
    assert (await store.cursors())[0] == batch.cursor


# ---------------------------------------------------------------------- R19

SECRETS = ("hunter2", "querysecret", "Bearer-secret", "payloadsecret")


@pytest.mark.parametrize(
    "fault",
    [
        None,
        faults.Status(403, body="no payloadsecret here, dear Bearer-secret with querysecret"),
        faults.Status(503, body="key querysecret"),
        faults.Status(400, body="bad querysecret"),
        faults.Redirect("http://other.invalid/?key=querysecret"),
        faults.Html(),
        faults.CutLine(),
        faults.NoCheckpoint(),
        faults.Truncate(),
        faults.Reset(),
        faults.BrokenChunk(),
        faults.Replace(b'{"data":[1,"payloadsecret"]}\n'),
        faults.Replace(b'{"data":{"a":"payloadsecret"\n'),
    ],
    ids=repr,
)
async def test_r19_no_secret_is_logged_raised_stored_or_shown(
    publisher: Publisher,
    store: RecordingStore,
    caplog: pytest.LogCaptureFixture,
    fault: faults.Fault | None,
) -> None:
    redact_http_logs()
    caplog.set_level(logging.DEBUG)
    assert publisher.url is not None
    publisher.extend(0, [{"text": "payloadsecret", "n": 1}] * 3)
    if fault is not None:
        publisher.fail(fault, times=None)
        if isinstance(fault, (faults.Status, faults.Html)):
            publisher.fail(fault, on="discovery", times=None, after=1)
    url = publisher.url.replace("http://", "http://me:hunter2@") + "?key=querysecret"
    shown: list[str] = []
    policy = RetryPolicy(base_delay=0.001, max_delay=0.002, give_up_after=0.05, refused_for=0.05)
    async with httpx.AsyncClient(headers={"x-key": "Bearer-secret"}) as http:
        try:
            async with FeedConsumer(
                url,
                store=store,
                http=http,
                limits=limits(),
                retry=policy,
                follow=False,
                on_error="raise",
            ) as consumer:
                try:
                    with anyio.fail_after(SAFETY_LIMIT):
                        async for event in consumer:
                            shown.append(repr(event))  # noqa: PERF401 - also those before an error
                finally:
                    shown += [repr(consumer), str(consumer.status()), str(consumer.key)]
        except FeedError as error:
            shown += _chain(error)
    shown += [
        record.getMessage() + str(record.args) + str(record.exc_info)
        for record in caplog.records
        if not record.name.startswith(("asyncio", "uvicorn"))
    ]
    shown += [str(await store.feeds())]
    assert "querysecret" not in str(publisher.requests[0].headers)
    assert publisher.requests[0].query == {"key": "querysecret"}
    for text in shown:
        for secret in (
            SECRETS if fault is None or not isinstance(fault, faults.Status) else SECRETS[:2]
        ):
            assert secret not in text


def _chain(error: BaseException | None) -> list[str]:
    found = []
    while error is not None:
        found += [
            str(error),
            repr(error),
            str(error.__dict__) if isinstance(error, FeedError) else "",
        ]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


# ---------------------------------------------------------------------- status


async def test_status_before_entering_is_empty(publisher: Publisher) -> None:
    status = consume(publisher).status()
    assert status.partitions == {}
    assert status.dialect is None


async def test_status_says_caught_up_only_once_everything_read_is_committed(
    publisher: Publisher,
) -> None:
    started = datetime.now(UTC)
    end = numbers(publisher, 0, range(5))
    async with consume(publisher) as consumer:
        assert consumer.status()[0].caught_up is None
        assert consumer.status()[0].behind_seconds is None
        batches = consumer.batches()
        batch = await next_batch(batches)
        await wait_until(lambda: last_fetch(publisher).cursor == end)
        status = consumer.status()[0]
        assert status.events == 5
        assert status.cursor == "_first", "nothing is committed"
        assert status.caught_up is False, "the application has not finished with the batch"
        contact = status.last_contact
        await batch.commit()
        async with nothing_comes(batches):
            await wait_until(lambda: consumer.status()[0].caught_up)
        status = consumer.status()[0]
    assert (status.state, status.cursor, status.caught_up, status.waits_for, status.error) == (
        PartitionState.CAUGHT_UP,
        end,
        True,
        (),
        None,
    )
    assert status.last_event is not None
    assert status.last_contact is not None
    assert started <= status.last_event <= status.last_contact <= datetime.now(UTC)
    assert status.caught_up_at is not None
    assert contact is not None
    assert contact <= status.caught_up_at <= datetime.now(UTC)
    assert status.behind_seconds is not None


async def test_status_of_a_partition_that_is_retried_has_its_error_and_the_time_of_the_first(
    publisher: Publisher,
) -> None:
    publisher.fail(503, times=None)
    before = datetime.now(UTC)
    async with consume(publisher) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(_consume_all, consumer)
        await wait_until(lambda: consumer.status()[0].state == "retrying")
        status = consumer.status()[0]
        publisher.heal()
        await wait_until(lambda: consumer.status()[0].state == "caught up")
        assert consumer.status()[0].error is None
        assert consumer.status()[0].since is None
        tasks.cancel_scope.cancel()
    assert status.error is not None
    assert "503" in status.error
    assert status.since is not None
    assert before <= status.since <= datetime.now(UTC)
    assert status.caught_up is None
    assert status.retry_at is not None


async def test_status_of_a_drained_partition(publisher: Publisher) -> None:
    numbers(publisher, 0, [0])
    publisher.close(0)
    async with consume(publisher, follow=False) as consumer:
        await read_n(consumer)
        status = consumer.status()
    assert (status[0].state, status[0].caught_up) == (PartitionState.DRAINED, True)
    assert status.events == 1
    assert status.dialect == "v2-token"


async def test_status_can_be_read_after_the_block(publisher: Publisher) -> None:
    numbers(publisher, 0, [0])
    async with consume(publisher, follow=False) as consumer:
        await read_n(consumer)
    assert consumer.status().events == 1


# ---------------------------------------------------------------------- the end without follow


async def test_follow_false_ends_on_an_empty_feed(serve: Callable[..., Publisher]) -> None:
    for publisher in (serve(()), serve(3), serve(1, dialect="v2-draft")):
        async with consume(publisher, follow=False) as consumer:
            assert await read_n(consumer) == []


async def test_follow_false_reads_children_that_appear_while_the_parent_is_read(
    publisher: Publisher,
) -> None:
    fill(publisher, 30)
    seen = []
    async with consume(
        publisher, follow=False, limit={"discovery_interval": 3600, "max_batch_bytes": 1}
    ) as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            async for event in consumer:
                seen.append(event.json())
                if len(seen) == 3:
                    publisher.split(0)
                    fill(publisher, 10, start=30)
                if len(seen) == 35:
                    publisher.split(1)
    assert_each_entity_in_order_and_once(seen, publisher)


async def test_follow_false_is_an_error_when_children_wait_for_an_uncommitted_parent(
    publisher: Publisher,
) -> None:
    from feedapi_client import CommitOrderError

    numbers(publisher, 0, [0])
    publisher.split(0)
    async with consume(publisher, follow=False) as consumer:
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(CommitOrderError, match="commit"):
            async for _ in consumer.batches():
                pass


async def test_follow_false_waits_for_a_partition_that_is_retried(publisher: Publisher) -> None:
    publisher.add(1)
    numbers(publisher, 0, [0])
    numbers(publisher, 1, [1])
    publisher.fail(503, partition=0, times=8)
    async with consume(publisher, follow=False) as consumer:
        assert sorted(await read_n(consumer)) == [0, 1]
    assert publisher.counters["fetch 503"] == 8


async def test_follow_false_waits_for_handlers_whose_commits_start_children(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(2)
    fill(publisher, 20)
    publisher.split(0)
    publisher.split(1, method="cursor-from")
    fill(publisher, 20, start=20)
    seen: list[Any] = []

    async def handle(batch: Batch) -> None:
        await anyio.sleep(0.02)  # other partitions are at their end meanwhile
        seen.extend(event.json() for event in batch.events)

    async with consume(publisher, follow=False) as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            await consumer.run(handle)
    assert_each_entity_in_order_and_once(seen, publisher)
