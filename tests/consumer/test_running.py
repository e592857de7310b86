"""R14 retry, R15 poll and stream, R16 back-pressure, R18 errors of one partition, R19 secrets.

Also what `status()` shows, and how an iteration ends without `follow`.
"""

from __future__ import annotations

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
    CommitOrderError,
    FeedError,
    FeedUnavailableError,
    FencedError,
    FetchOptions,
    NegotiationError,
    ProtocolError,
    RetryPolicy,
    TransportError,
)
from feedapi_client.status import PartitionState
from feedapi_client.testing import Publisher, faults
from tests.consumer.helpers import (
    BROKEN,
    SAFETY_LIMIT,
    SHORT,
    LocalFeed,
    consume,
    last_fetch,
    limits,
    n_of,
    next_batch,
    numbers,
    read_n,
    rediscovered,
    take,
    wait_until,
)
from tests.consumer.script import Play, Step, do, play
from tests.consumer.scripted import Listed, Scripted

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]
on_a_socket = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
SELDOM = {"discovery_interval": 3600}
SMALL = {"max_batch_bytes": 1}


# ---------------------------------------------------------------------- R14


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
async def test_r14_temporary_error_statuses_are_retried(status: int) -> None:
    await play(do.fail(status, times=4), do.numbers(0, 0, 1), do.reads(0, 1))


async def test_r14_a_page_that_breaks_the_protocol_is_not_asked_for_again() -> None:
    broken = ProtocolError, r"partition 0: .*_last"
    await play(
        *(do.fail(BROKEN, times=None), do.open(), do.raises(*broken, do.takes(0))), do.fetches(1, 1)
    )


HOUR_LATER = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)


@pytest.mark.parametrize(
    ("status", "retry_after", "least"),
    [(503, "0.3", 0.3), (429, HOUR_LATER, 0.5)],
    ids=["seconds", "a date, within max_retry_after"],
)
async def test_r14_retry_after_is_honoured(status: int, retry_after: str, least: float) -> None:
    feed = Scripted({0: Listed(1)})
    refusals = iter([httpx.Response(status, headers={"retry-after": retry_after})])
    feed.answers.append(lambda _, ask: next(refusals, None) if ask.params else None)
    policy = RetryPolicy(base_delay=0.001, max_delay=0.001, max_retry_after=0.5)
    assert await feed.read(retry=policy) == feed.everything
    first, second = [ask.at for ask in feed.fetches][:2]
    assert second - first >= least


async def test_r14_the_callers_function_decides_what_is_retried() -> None:
    feed, asked = LocalFeed(), []

    def decide(error: FeedError) -> Any:
        asked.append(type(error).__name__)
        return "retry" if isinstance(error, AuthenticationError) else "fatal"

    feed.fail(401, times=3)
    feed.numbers(0, 0)
    policy = RetryPolicy(base_delay=0.001, max_delay=0.001, decide=decide)
    async with feed.open(retry=policy) as reader:
        assert await reader.take() == [0]
        feed.fail(503)
        with pytest.raises(FeedUnavailableError):
            await reader.take()
    assert asked == ["AuthenticationError"] * 3 + ["FeedUnavailableError"]


async def test_r14_a_partition_that_never_recovers_is_given_up_after_its_time() -> None:
    given_up = FeedUnavailableError, "503"
    await play(*(do.fail(503, times=None), do.open(retry=SHORT), do.raises(*given_up, do.takes(0))))


async def test_r14_progress_resets_the_time_to_give_up() -> None:
    """Each response breaks off after a checkpoint. That is slow progress, not a failure."""
    feed = LocalFeed()
    feed.numbers(0, *range(100))
    feed.fail(faults.Both((faults.Delay(0.02), faults.CutLine(after_lines=6))), times=None)
    policy = RetryPolicy(base_delay=0.001, max_delay=0.001, give_up_after=0.15)
    async with feed.open(retry=policy) as reader:
        assert await reader.take(90) == [*range(90)]


@on_a_socket
@pytest.mark.parametrize(
    "fault",
    [
        *(faults.Hang(), faults.Hang(after_lines=2), faults.Status(503), faults.Reset()),
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


@on_a_socket
@pytest.mark.parametrize(
    "odd",
    [
        (faults.Hang(), faults.Hang(after_lines=2)),
        (faults.Trickle(piece=7), faults.Gzip(), faults.Gzip()),
    ],
    ids=["that hang are made again", "that trickle or are compressed are read"],
)
async def test_r14_requests(publisher: Publisher, odd: tuple[faults.Fault, ...]) -> None:
    for fault in odd:
        publisher.fail(fault)
    numbers(publisher, 0, range(30))
    async with consume(publisher, follow=False, limit={"request_timeout": 0.5}) as consumer:
        assert await read_n(consumer) == [*range(30)]


@on_a_socket
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


async def test_r14_a_redirect_to_another_origin_is_refused() -> None:
    feed, elsewhere = LocalFeed(), "http://elsewhere/feed"
    feed.fail(faults.Redirect(elsewhere + "/events"), times=None)
    async with feed.open(retry=SHORT) as reader:
        with pytest.raises(TransportError, match="another origin"):
            await reader.take()
    feed.fail(faults.Redirect(elsewhere), on="discovery", times=None)
    with pytest.raises((NegotiationError, TransportError), match="another origin"):
        await feed.enter()


# ---------------------------------------------------------------------- R15


async def test_r15_the_poll_interval_doubles_up_to_its_maximum_and_falls_back_at_an_event() -> None:
    feed = Scripted({0: Listed()}, echo=True)
    limit = limits(poll_interval=1, max_poll_interval=64, **SELDOM)

    async def polls() -> list[float]:
        before = len(feed.fetches)
        await anyio.sleep(600)
        return [round(after - at) for at, after in pairwise([a.at for a in feed.fetches[before:]])]

    async with feed.following(limits=limit):
        grows = [1, 2, 4, 8, 16, 32, 64, 64]
        assert (await polls())[:8] == grows
        feed.partitions[0].events = 1
        found = await polls()
        begins = found.index(1)
        assert found[begins : begins + 6] == grows[:6]
    assert feed.seen == [(0, 0)]


STREAM = FetchOptions(stream=True)
STREAMS = do.open(fetch=STREAM)
NEVER_GIVES_UP = RetryPolicy(base_delay=0.01, max_delay=0.02, give_up_after=0.2)
GROWING = {"poll_interval": 0.02, "max_poll_interval": 3600, **SELDOM}
LIMITED = {"max_concurrent_fetches": 2}


def fetched(times: int) -> Callable[[Play], bool]:
    return lambda play: play.feed.counters["fetch"] >= times


NOTHING = do.keep("it")


def publishes(count: int, between: Step = NOTHING) -> list[Step]:
    return [step for n in range(count) for step in (do.numbers(0, n), do.takes(n), between)]


STREAMING: dict[str, list[Step]] = {
    **{
        f"batches are delivered as they arrive, stream={stream}": [
            *(do.open(fetch=FetchOptions(stream=stream), limit=SELDOM), *publishes(10)),
            *(do.fetches(1, 1), do.asks_stream(asked)),
        ]
        for stream, asked in ((True, "y"), (3_600_000, "3600000"))
    },
    "it is not asked for where the feed has none": [
        *(do.set(stream=False), STREAMS, *publishes(1), do.asks_stream(None)),
    ],
    "an idle one is reopened and never given up": [
        do.open(fetch=STREAM, retry=NEVER_GIVES_UP, limit={"stream_idle_timeout": 0.05}),
        *(do.numbers(0, 0), do.delivers("first", 0), do.commits("first")),
        *(do.nothing_until(fetched(10)), do.wait_for(lambda p: p.reader.state() != "retrying")),
        *(do.errors({0: None}), do.numbers(0, 1), do.delivers("second", 1)),
    ],
    # With a pause that doubles these would take more than two minutes.
    "the next one follows without a growing pause": [
        *(do.open(fetch=FetchOptions(stream=20), limit=GROWING), do.nothing_until(fetched(14))),
    ],
    **{
        f"a split, {dialect}, {method}": [
            *(do.upgrade(dialect), do.fill(0, 10), STREAMS, do.takes(*range(10))),
            *(do.split(0, method=method), do.fill(10, 20), do.takes_all(*range(10, 20))),
        ]
        for dialect in ("v2-draft", "v2-token")
        for method in ("starts-after", "cursor-from")
    },
    "a new token": [do.upgrade("v2-token"), STREAMS, *publishes(5, do.rotate_token())],
    "that of a closed partition is ended, so that its children start": [
        *(do.numbers(0, 0), do.fail(faults.Hang(after_bytes=1_000_000), times=None)),
        *(do.open(fetch=STREAM, limit={"stream_idle_timeout": 3600}), do.takes(0)),
        *(do.split(0, 1), do.heal(), do.numbers(1, 1), do.takes(1)),
    ],
    "those of more partitions than there are slots take turns": [
        *(do.add(partition) for partition in range(1, 6)),
        do.open(fetch=STREAM, limit=LIMITED),
        *(do.numbers(partition, partition) for partition in range(6)),
        *(do.takes_all(*range(6)), do.wait_for(lambda play: play.feed.max_in_flight <= 3)),
    ],
    "without follow it ends": [
        *(do.numbers(0, *range(10)), do.reads(*range(10), fetch=STREAM)),
    ],
}


@on_a_socket
@pytest.mark.parametrize("steps", STREAMING.values(), ids=STREAMING)
async def test_r15_a_stream(steps: list[Step], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feedapi_client.runtime.fetching.SHARED_STREAM_MILLISECONDS", 20)
    feed = LocalFeed(dialect="v2-draft", stream=True)
    with feed.serve():
        await play(*steps, feed=feed)


# ---------------------------------------------------------------------- R16


def publish_long(publisher: Publisher, partitions: int, events: int, size: int) -> None:
    for partition in range(partitions):
        publisher.extend(partition, [{"n": n, "text": "x" * size} for n in range(events)])


@on_a_socket
async def test_r16_a_slow_application_stops_the_reading(serve: Callable[..., Publisher]) -> None:
    publisher = serve(8, page_size=1_000_000, checkpoint_every=10)
    publish_long(publisher, 8, 3000, 1000)
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


@on_a_socket
async def test_r16_a_stream_that_the_application_does_not_read_is_not_buffered_without_end(
    serve: Callable[..., Publisher],
) -> None:
    streaming = serve(1, dialect="v2-draft", stream=True, checkpoint_every=5)
    limit = {"max_buffered_bytes": 500_000, "max_line_bytes": 100_000, "max_batch_bytes": 100_000}
    async with consume(streaming, fetch=STREAM, limit=limit) as consumer:
        batches = consumer.batches()
        numbers(streaming, 0, [0])
        await next_batch(batches)
        for _ in range(20):
            publish_long(streaming, 1, 200, 1000)
            await anyio.sleep(0.005)
            assert consumer.status().buffered_bytes <= 500_000
        seen = 0
        with anyio.fail_after(SAFETY_LIMIT):
            while seen < 4000:
                seen += len((await anext(batches)).events)


TINY = {
    "max_batch_bytes": 1,
    "max_concurrent_fetches": 1,
    "max_buffered_bytes": 200,
    "max_attempts_without_progress": 1,
}


@pytest.mark.parametrize("changed", [*TINY, "all"])
async def test_r16_tiny_limits_lose_and_repeat_nothing(changed: str) -> None:
    feed = LocalFeed(3, page_size=6, checkpoint_every=3)
    feed.fill(0, 60)
    feed.split(0)
    feed.fill(60, 90)
    limit = TINY if changed == "all" else {changed: TINY[changed]}
    feed.check(await feed.read_events(limit={"max_line_bytes": 200, **limit}))


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
    async with consume(publisher, follow=False, limit=SELDOM) as consumer:
        seen = [event.json()["n"] async for event in consumer]
        status = consumer.status()
    assert sorted(seen) == [*range(count)]
    assert len(status.partitions) == count
    assert status.events == count
    assert publisher.counters["fetch"] <= 2 * count
    assert publisher.max_in_flight <= 65


# ---------------------------------------------------------------------- R18

BREAK_0 = do.fail(BROKEN, partition=0, times=None)
PARKED: dict[str, list[Step]] = {
    "without follow it ends when the others are at their end": [
        *(do.begin_with(3), do.numbers(0, 0), do.numbers(1, 1), do.numbers(2, 2), BREAK_0),
        *(do.open(on_error="park", follow=False), do.ends(1, 2), do.state(0, "parked")),
    ],
    "its successors are parked": [
        *(do.numbers(0, 0), BREAK_0, do.add(1), do.open(on_error="park"), do.numbers(1, 1)),
        *(do.takes(1), do.state(0, "parked"), do.split(0, method="cursor-from"), do.knows(2)),
        *(do.numbers(1, 2), do.takes(2), do.state(2, "parked"), do.state(3, "parked")),
    ],
    "a new iteration tries it again": [
        *(do.numbers(0, 0), do.fail(BROKEN, partition=0)),
        *(do.open(on_error="park", follow=False), do.ends(), do.again(), do.ends(0)),
    ],
    "a batch in flight can be committed": [
        *(do.add(1), do.numbers(0, 0), do.open(on_error="park"), do.delivers("flies", 0)),
        *(BREAK_0, do.state(0, "parked"), do.commits("flies"), do.at_end_cursor()),
    ],
}


@pytest.mark.parametrize("steps", PARKED.values(), ids=PARKED)
async def test_r18_a_partition_is_parked(steps: list[Step]) -> None:
    await play(*steps)


async def test_r18_raise_ends_the_iteration_and_loses_nothing() -> None:
    feed, seen = LocalFeed(2), []
    feed.fill(0, 20)
    rule = feed.fail(BROKEN, partition=0, times=None)

    async def work() -> None:
        async with feed.consume() as consumer:
            async for batch in consumer.batches():
                seen.extend(batch.events)
                await batch.commit()

    with pytest.raises(ProtocolError, match="partition 0"):
        await work()
    rule.remove()
    feed.check(seen + await feed.read_events())


async def test_r18_park_stops_the_partition_and_its_descendants_and_the_others_go_on() -> None:
    feed, before = LocalFeed(2), datetime.now(UTC)
    feed.numbers(0, 0)
    feed.split(0)
    feed.split(2)
    feed.fail(BROKEN, partition=0, times=None)
    async with feed.open(on_error="park") as reader:
        for n in range(3):
            feed.numbers(1, n)
            assert await reader.take() == [n]
        await reader.until("parked")
        status = reader.consumer.status()
    for partition in (0, 2, 3, 4, 5):
        parked = status[partition]
        assert parked.state == "parked"
        assert parked.error is not None
        assert "partition 0" in parked.error
        assert "_last" in parked.error
        assert parked.since is not None
        assert before <= parked.since <= datetime.now(UTC)
    assert (status[1].error, status[1].since) == (None, None)


@pytest.mark.parametrize("late", [False, True])
async def test_r18_a_lost_partition_is_parked_too(late: bool) -> None:
    feed = LocalFeed()
    await feed.enter()
    if not late:
        feed.add(5, starts_after=4)
    async with feed.open(on_error="park") as reader:
        feed.numbers(0, 0)
        assert await reader.take() == [0]
        if late:
            feed.add(5, starts_after=4)
        feed.numbers(0, 1)
        assert await reader.take() == [1]
        await reader.until("parked", 5)
        status = reader.consumer.status()[5]
    assert "partition 4" in (status.error or "")
    assert status.since is not None


async def test_r18_fencing_is_not_parked() -> None:
    feed = LocalFeed()
    feed.numbers(0, 0)
    async with feed.open(on_error="park") as reader:
        batch = await reader.batch()
        await feed.store.replace(reader.consumer.key, {})
        await feed.read()
        with pytest.raises(FencedError):
            await batch.commit()


# ---------------------------------------------------------------------- status


@on_a_socket
async def test_status_says_caught_up_only_once_everything_read_is_committed() -> None:
    feed, started = LocalFeed(), datetime.now(UTC)
    end = feed.numbers(0, *range(5))
    assert feed.consume().status().partitions == {}
    assert feed.consume().status().dialect is None
    with feed.serve():
        async with feed.open() as reader:
            status = reader.consumer.status()[0]
            assert (status.caught_up, status.behind_seconds) == (None, None)
            batch = await reader.batch()
            await wait_until(lambda: last_fetch(feed).cursor == end)
            status = reader.consumer.status()[0]
            assert status.events == 5
            assert status.cursor == "_first", "nothing is committed"
            assert status.caught_up is False, "the application has not finished with the batch"
            contact = status.last_contact
            await batch.commit()
            await reader.at_end()
            status = reader.consumer.status()[0]
        assert (status.state, status.cursor, status.caught_up) == (
            PartitionState.CAUGHT_UP,
            end,
            True,
        )
        assert (status.waits_for, status.error) == ((), None)
        assert status.last_event is not None
        assert status.last_contact is not None
        assert started <= status.last_event <= status.last_contact <= datetime.now(UTC)
        assert status.caught_up_at is not None
        assert contact is not None
        assert contact <= status.caught_up_at <= datetime.now(UTC)
        assert status.behind_seconds is not None


async def test_status_of_a_partition_that_is_retried_has_its_error_and_the_first_time() -> None:
    feed, before = LocalFeed(), datetime.now(UTC)
    feed.fail(503, times=None)
    async with feed.running() as reader:
        await reader.until("retrying")
        first = reader.consumer.status()[0]
        await wait_until(lambda: feed.counters["fetch"] >= 5)
        assert reader.consumer.status()[0].since == first.since
        feed.heal()
        await reader.until("caught up")
        healed = reader.consumer.status()[0]
        assert (healed.error, healed.since) == (None, None)
    assert "503" in (first.error or "")
    assert first.since is not None
    assert before <= first.since <= datetime.now(UTC)
    assert first.caught_up is None
    assert first.retry_at is not None


async def test_status_of_a_drained_partition_also_after_the_block() -> None:
    feed = LocalFeed()
    feed.numbers(0, 0)
    feed.close(0)
    async with feed.consume(follow=False) as consumer:
        await read_n(consumer)
        status = consumer.status()
    assert (status[0].state, status[0].caught_up) == (PartitionState.DRAINED, True)
    assert (status.events, status.dialect) == (1, "v2-token")
    assert consumer.status().events == 1


# ---------------------------------------------------------------------- the end without follow


async def test_follow_false_ends_on_an_empty_feed() -> None:
    for feed in (LocalFeed(()), LocalFeed(3), LocalFeed(dialect="v2-draft")):
        assert await feed.read() == []


async def test_follow_false_reads_children_that_appear_while_the_parent_is_read() -> None:
    feed, seen = LocalFeed(), []
    feed.fill(0, 30)
    async with feed.consume(follow=False, limit={**SELDOM, **SMALL}) as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            async for event in consumer:
                seen.append(event)
                if len(seen) == 3:
                    feed.split(0)
                    feed.fill(30, 40)
                if len(seen) == 35:
                    feed.split(1)
    feed.check(seen)


async def test_follow_false_is_an_error_when_children_wait_for_an_uncommitted_parent() -> None:
    feed = LocalFeed()
    feed.numbers(0, 0)
    feed.split(0)
    async with feed.consume(follow=False) as consumer:
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(CommitOrderError, match="commit"):
            async for _ in consumer.batches():
                pass


async def test_follow_false_waits_for_a_partition_that_is_retried() -> None:
    feed = LocalFeed(2)
    feed.numbers(0, 0)
    feed.numbers(1, 1)
    feed.fail(503, partition=0, times=8)
    assert sorted(await feed.read()) == [0, 1]
    assert feed.counters["fetch 503"] == 8


async def test_follow_false_waits_for_handlers_whose_commits_start_children() -> None:
    feed, seen = LocalFeed(2), []
    feed.fill(0, 20)
    feed.split(0)
    feed.split(1, method="cursor-from")
    feed.fill(20, 40)

    async def handle(batch: Batch) -> None:
        await anyio.sleep(0.02)  # other partitions are at their end meanwhile
        seen.extend(batch.events)

    await feed.run(handle)
    feed.check(seen)
