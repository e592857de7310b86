"""R1, R2 upgrade in place, R3 what a batch is, R4 order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from feedapi_client import (
    Batch,
    BufferLimitError,
    FeedError,
    FetchOptions,
    Limits,
    LineTooLongError,
    NegotiationError,
    ProtocolError,
)
from feedapi_client.testing import Publisher, Quirks, faults
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    LocalFeed,
    consume,
    last_fetch,
    n_of,
    numbers,
    read_n,
    take,
    wait_until,
)
from tests.consumer.script import Play, Step, do, play

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]
SMALL = {"max_batch_bytes": 1}

# ---------------------------------------------------------------------- R1, R2


def speaks(dialect: str) -> Callable[[Play], bool]:
    return lambda play: play.reader.consumer.status().dialect == dialect


def follows(dialect: str, n: int) -> list[Step]:
    """The consumer reads on after the upgrade, and speaks the dialect soon."""
    upgraded = do.upgrade(dialect), do.numbers(n % 2, n), do.takes(n)
    return [*upgraded, do.wait_for(speaks(dialect))]


CARRIES_OVER = ("v1", "v2-draft", "v2-token", "v2-draft")
SELECTION = FetchOptions(event_types=["a"]), FetchOptions(filters={"colour": "red"})
DIALECTS: dict[str, list[Step]] = {
    "r01 a v1 feed without a partition count says how to give it": [
        *(do.begin_with(2, dialect="v1"), do.raises(NegotiationError, "v1_partitions", do.enter())),
    ],
    "r01 discovery is retried on entry": [
        *(do.fail(503, on="discovery", times=3), do.numbers(0, 1), do.reads(1)),
    ],
    "r02 a running consumer follows from v1 to draft to token and back": [
        *(do.begin_with(2, dialect="v1"), do.numbers(0, 0), do.open(v1_partitions=2), do.takes(0)),
        *(*follows("v2-draft", 1), *follows("v2-token", 2)),
        *(*follows("v2-draft", 3), *follows("v2-token", 4)),
    ],
    "r02 cursors carry over when the dialect changed while the consumer was down": [
        do.begin_with(2, dialect="v1"),
        *[
            step
            for n, dialect in enumerate(CARRIES_OVER)
            for step in (
                *(do.upgrade(dialect), do.fill(10 * n, 10 * n + 10)),
                do.reads_all(*range(10 * n, 10 * n + 10), v1_partitions=2),
            )
        ],
    ],
    "r02 an upgraded feed may split": [
        *(do.begin_with(1, dialect="v1"), do.fill(0, 10), do.open(v1_partitions=1)),
        *(do.takes(*range(10)), do.upgrade("v2-token"), do.split(0), do.fill(10, 20)),
        do.takes_all(*range(10, 20)),
    ],
    "r02 options that a dialect can't carry are an error, not a wrong selection": [
        do.begin_with(dialect="v2-draft", filters=["entity"]),
        do.raises(ProtocolError, "feed", do.enter(fetch=SELECTION[0])),
        do.raises(ProtocolError, "colour", do.enter(fetch=SELECTION[1])),
    ],
}


@pytest.mark.parametrize("steps", DIALECTS.values(), ids=DIALECTS)
async def test_r01_r02_dialects(steps: list[Step]) -> None:
    await play(*steps)


async def test_r02_a_v1_feed_is_upgraded_even_while_it_still_answers_v1() -> None:
    feed = LocalFeed(dialect="v1")
    async with feed.open(v1_partitions=1) as reader:
        feed.numbers(0, 0)
        await reader.take()
        feed.quirks = Quirks(answers_v1=True)
        feed.upgrade("v2-draft")
        await wait_until(lambda: reader.consumer.status().dialect == "v2-draft")
        # A v1 request that was sent before the discovery may still be under way.
        await wait_until(lambda: "partition" in last_fetch(feed).query)
        feed.numbers(0, 1)
        assert await reader.take() == [1]
        assert "n" not in last_fetch(feed).query


# ---------------------------------------------------------------------- R3

PASSING = [
    *(faults.CutLine(), faults.CutLine(after_lines=3), faults.ErrorText()),
    *(faults.ErrorText(after_lines=8), faults.Truncate(after_lines=7)),
    *(faults.Truncate(after_bytes=0), faults.Truncate(after_lines=6, chunked=True)),
    *(faults.Reset(), faults.Reset(after_lines=7), faults.BrokenChunk()),
    faults.NoCheckpoint(keep=1),
]
LASTING = [
    faults.NoFinalNewline(),
    faults.Both((faults.ExtraFields(), faults.UnknownCommands())),
]


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])  # these faults need a socket
@pytest.mark.parametrize(
    ("fault", "times"), [*((f, 4) for f in PASSING), *((f, None) for f in LASTING)], ids=repr
)
async def test_r03_an_odd_response_neither_loses_nor_repeats_an_event(
    publisher: Publisher, fault: faults.Fault, times: int | None
) -> None:
    numbers(publisher, 0, range(40))
    publisher.fail(fault, times=times)
    publisher.fail(faults.ExtraFields(), on="discovery", times=None)
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == [*range(40)]


BOUNDED = {"max_buffered_bytes": 1_000_000, "max_line_bytes": 100_000}
FETCHED = lambda play: last_fetch(play.feed).cursor == play.feed.end_cursor(0)  # noqa: E731
BATCHES: dict[str, list[Step]] = {
    "events behind the last checkpoint are fetched again, and not delivered before": [
        *(do.set(checkpoint_every=4), do.numbers(0, *range(10))),
        *(do.fail(faults.NoCheckpoint(keep=2)), do.open(limit=SMALL)),
        *(do.delivers("first", *range(8)), do.delivers("rest", 8, 9)),
    ],
    "a batch goes up to the last checkpoint received": [
        *(do.set(page_size=1000), do.numbers(0, *range(100)), do.open()),
        *(do.delivers("all", *range(100)), do.check_cursor("all")),
    ],
    "what a slow application has not taken is joined into one batch": [
        *(do.numbers(0, *range(100)), do.open(), do.delivers_some("first"), do.wait_for(FETCHED)),
        do.delivers_some("rest", last=99),
    ],
    "cursors that move without events are committed by the loop": [
        *(do.numbers(0, 1), do.append_internal(0, 5000), do.reads(1), do.at_end_cursor()),
    ],
    "many events without a checkpoint are delivered while they fit": [
        *(do.set(page_size=20_000, checkpoint_every=20_000), do.numbers(0, *range(20_000))),
        do.reads(*range(20_000)),
    ],
    "awkward cursors are sent back unchanged": [
        do.begin_with(quirks=Quirks(awkward_cursors=True), page_size=3, checkpoint_every=2),
        *(do.fill(0, 30), do.reads(*range(30))),
    ],
}


@pytest.mark.parametrize("steps", BATCHES.values(), ids=BATCHES)
async def test_r03_a_checkpoint_closes_a_batch(steps: list[Step]) -> None:
    await play(*steps)


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])  # what has no end needs a socket
@pytest.mark.parametrize(
    ("partitions", "fault", "error", "text"),
    [
        (1, faults.EndlessRun(), BufferLimitError, "max_buffered_bytes"),
        (3, faults.EndlessRun(), BufferLimitError, "max_buffered_bytes"),
        (1, faults.EndlessLine(), LineTooLongError, "max_line_bytes"),
    ],
)
async def test_r03_too_much_without_a_checkpoint_is_an_error_that_names_the_limit(
    serve: Callable[..., Publisher],
    partitions: int,
    fault: faults.Fault,
    error: type[FeedError],
    text: str,
) -> None:
    publisher = serve(partitions, page_size=3, checkpoint_every=3)
    for partition in range(partitions):
        numbers(publisher, partition, range(3))
    publisher.fail(fault, times=None)
    async with consume(publisher, limit=BOUNDED) as consumer:
        with pytest.raises(error, match=text) as caught:
            await take(consumer.batches(), 2)
    assert caught.value.partition in range(partitions)


@pytest.mark.parametrize(
    ("most", "page", "every", "least"),
    [
        # Parts of an eighth are joined, so that only the last one may be much smaller.
        *((most, 1000, 1, most * 7 // 8) for most in (1, 7, 100, 5000)),
        (10, 50, 50, 50),  # what one checkpoint closes
    ],
)
async def test_r03_batches_are_made_up_to_a_number_of_events(
    most: int, page: int, every: int, least: int
) -> None:
    feed, sizes = LocalFeed(page_size=page, checkpoint_every=every), list[int]()
    feed.numbers(0, *range(1000))
    async with feed.consume(follow=False, limit={"max_batch_events": most}) as consumer:
        async for batch in consumer.batches():
            sizes.append(len(batch))
            await batch.commit()
    assert sum(sizes) == 1000
    assert max(sizes) <= max(most, every)
    assert all(size >= least for size in sizes[:-1])


async def test_a_batch_that_could_have_more_events_is_delivered_at_once() -> None:
    feed = LocalFeed()
    feed.numbers(0, *range(50))
    async with feed.open(limits=Limits(max_batch_events=100)) as reader:
        began = anyio.current_time()
        await reader.batch()
        assert anyio.current_time() == began


async def test_r03_a_batch_without_events_counts() -> None:
    feed, batches = LocalFeed(), []
    end = feed.append_internal(0, 50)
    async with feed.consume(follow=False) as consumer:
        async for batch in consumer.batches():
            await batch.commit()
            batches.append(batch.events)
    assert batches == [[]]
    assert await feed.store.cursors() == {0: end}


async def test_r03_long_lines_are_events_like_any_other() -> None:
    feed = LocalFeed()
    payloads = [{"n": n, "text": "\u2028é" * (30_000 * n)} for n in range(1, 8)]
    feed.extend(0, payloads)
    assert [event.json() for event in await feed.read_events()] == payloads


# ---------------------------------------------------------------------- R4

CHILD = do.split(0, 1), do.numbers(1, 2)
ORDER: dict[str, list[Step]] = {
    **{
        f"a child waits for the commit of its parent's last batch, lastCursor {listed}": [
            *(do.set(quirks=Quirks(last_cursor=listed)), do.numbers(0, 0, 1), *CHILD, do.open()),
            *(do.delivers("parent", 0, 1), do.rediscovered(), do.waits(1, 0)),
            *(do.commits("parent"), do.delivers("child", 2)),
        ]
        for listed in ("closed", "never")
    },
    "it waits with a report: a stall is never silent": [
        *(do.numbers(0, 0, 1), *CHILD, do.open(), do.delivers("parent", 0, 1)),
        *(do.nothing_until(lambda play: play.reader.reports("not committed")), do.rediscovered()),
        do.waits(1, 0),
    ],
    "without ordered parent and child are read at once": [
        *(do.fail(503, partition=0, times=None), do.numbers(0, 0), do.split(0, 1)),
        *(do.numbers(1, 1), do.open(ordered=False), do.delivers("child", 1)),
    ],
    "without ordered everything is read once": [
        *(do.begin_with(2), do.fill(0, 40), do.split(0), do.fill(40, 80)),
        *(do.split(1, method="cursor-from"), do.fill(80, 120)),
        do.reads_all(*range(120), ordered=False),
    ],
    "nested splits are read parents first": [
        do.fill(0, 10),
        *[step for n in range(4) for step in (do.split(n, 1), do.fill(10 * n + 10, 10 * n + 20))],
        do.reads(*range(50)),
    ],
}


@pytest.mark.parametrize("steps", ORDER.values(), ids=ORDER)
async def test_r04_children_come_after_parents(steps: list[Step]) -> None:
    await play(*steps)


async def test_r04_a_late_commit_of_the_parents_last_batch_starts_the_child() -> None:
    feed, held = LocalFeed(), {}
    feed.split(0, 1)
    feed.numbers(1, 2)
    feed.add(9)
    async with feed.open() as reader:
        with anyio.fail_after(SAFETY_LIMIT):
            while set(held) != {0, 9}:
                batch = await anext(reader.batches)
                held[batch.partition] = batch
        feed.numbers(9, 5)
        assert n_of((await anext(reader.batches)).events) == [5]
        await held[0].commit()
        assert await reader.commit(1) == [2]


async def test_r04_batches_of_a_partition_come_one_at_a_time_and_in_order() -> None:
    feed, in_flight, seen = LocalFeed(3, page_size=4, checkpoint_every=2), set(), []
    feed.fill(0, 120, entities=12)

    async def handle(batch: Batch) -> None:
        assert batch.partition not in in_flight
        in_flight.add(batch.partition)
        await anyio.sleep(0.001)
        seen.extend(batch.events)
        in_flight.discard(batch.partition)

    await feed.run(handle, limit=SMALL)
    feed.check(seen)


async def test_r04_run_handles_partitions_concurrently() -> None:
    feed, handled, all_at_once = LocalFeed(3), set(), anyio.Event()
    for partition in range(3):
        feed.numbers(partition, partition)

    async def handle(batch: Batch) -> None:
        if batch.events:
            handled.add(batch.partition)
            if len(handled) == 3:
                all_at_once.set()
            await all_at_once.wait()

    await feed.run(handle)
    assert handled == {0, 1, 2}


async def test_r04_a_slow_handler_delays_no_other_partition() -> None:
    feed, seen = LocalFeed(2), []
    feed.numbers(0, 0)

    async def handle(batch: Batch) -> None:
        if batch.partition == 0 and batch.events:
            await anyio.sleep_forever()
        seen.extend(n_of(batch.events))

    async with feed.running(handle):
        for n in range(1, 6):
            feed.numbers(1, n)
            await wait_until(lambda n=n: n in seen)
    assert seen == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("way", ["batches", "events"])
async def test_several_tasks_on_one_iterator_are_refused_as_by_a_generator(way: str) -> None:
    feed, refused = LocalFeed(), []
    feed.fail(faults.Delay(0.1), times=None)  # nothing comes before both have asked
    async with feed.open() as reader:
        iterator: Any = getattr(reader, way)

        async def ask() -> None:
            try:
                await anext(iterator)
            except RuntimeError as error:
                refused.append(str(error))

        with anyio.fail_after(SAFETY_LIMIT):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await anyio.lowlevel.checkpoint()
                tasks.start_soon(ask)
                await wait_until(lambda: refused)
                feed.numbers(0, 1)
        assert len(refused) == 1
        assert "another task" in refused[0]
        feed.numbers(0, 2)
        await anext(iterator)  # it goes on
