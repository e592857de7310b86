"""R2 upgrade in place, R3 what a batch is, R4 order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from feedapi_client import (
    Batch,
    BufferLimitError,
    FetchOptions,
    LineTooLongError,
    NegotiationError,
    ProtocolError,
)
from feedapi_client.testing import Publisher, Quirks, faults
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    RecordingStore,
    assert_each_entity_in_order_and_once,
    consume,
    fill,
    last_fetch,
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


# ---------------------------------------------------------------------- R1, R2


async def test_r01_a_v1_feed_without_a_partition_count_says_how_to_give_it(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(2, dialect="v1")
    with pytest.raises(NegotiationError, match="v1_partitions"):
        await consume(publisher).__aenter__()


async def test_r01_discovery_is_retried_on_entry(publisher: Publisher) -> None:
    publisher.fail(503, on="discovery", times=3)
    numbers(publisher, 0, [1])
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == [1]


async def test_r02_a_running_consumer_follows_the_feed_from_v1_to_draft_to_token_and_back(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(2, dialect="v1", page_size=4, checkpoint_every=2)
    numbers(publisher, 0, [0])
    async with consume(publisher, v1_partitions=2, store=store) as consumer:
        events = aiter(consumer)
        seen = n_of(await take(events))
        for n, dialect in enumerate(("v2-draft", "v2-token", "v2-draft", "v2-token"), 1):
            publisher.upgrade(dialect)  # type: ignore[arg-type]
            numbers(publisher, n % 2, [n])
            seen += n_of(await take(events))
            await wait_until(lambda dialect=dialect: consumer.status().dialect == dialect)  # type: ignore[misc]
    assert seen == [0, 1, 2, 3, 4]


async def test_r02_cursors_carry_over_when_the_dialect_changed_while_the_consumer_was_down(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(2, dialect="v1")
    seen = []
    for start, dialect in enumerate(("v1", "v2-draft", "v2-token", "v2-draft")):
        publisher.upgrade(dialect)  # type: ignore[arg-type]
        fill(publisher, 10, start=start * 10)
        async with consume(publisher, v1_partitions=2, store=store, follow=False) as consumer:
            seen += [event.json() for event in await read(consumer)]
            assert consumer.status().dialect == dialect
    assert_each_entity_in_order_and_once(seen, publisher)
    assert len(seen) == 40


async def test_r02_an_upgraded_feed_may_split(serve: Callable[..., Publisher]) -> None:
    publisher = serve(1, dialect="v1")
    fill(publisher, 10)
    async with consume(publisher, v1_partitions=1) as consumer:
        events = aiter(consumer)
        seen = await take(events, 10)
        publisher.upgrade("v2-token")
        publisher.split(0)
        fill(publisher, 10, start=10)
        seen += await take(events, 10)
    assert_each_entity_in_order_and_once([event.json() for event in seen], publisher)


async def test_r02_a_v1_feed_is_upgraded_even_while_it_still_answers_v1(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(1, dialect="v1")
    async with consume(publisher, v1_partitions=1) as consumer:
        events = aiter(consumer)
        numbers(publisher, 0, [0])
        await take(events)
        publisher.quirks = Quirks(answers_v1=True)
        publisher.upgrade("v2-draft")
        await wait_until(lambda: consumer.status().dialect == "v2-draft")
        # A v1 request that was sent before the discovery may still be under way.
        await wait_until(lambda: "partition" in last_fetch(publisher).query)
        numbers(publisher, 0, [1])
        assert n_of(await take(events)) == [1]
        assert "n" not in last_fetch(publisher).query


async def test_r02_options_that_the_new_dialect_can_not_carry_are_an_error_not_a_wrong_selection(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(1, dialect="v2-draft", filters=["entity"])
    with pytest.raises(ProtocolError):
        await consume(publisher, fetch=FetchOptions(event_types=["a"])).__aenter__()
    with pytest.raises(ProtocolError, match="colour"):
        await consume(publisher, fetch=FetchOptions(filters={"colour": "red"})).__aenter__()


# ---------------------------------------------------------------------- R3


async def test_r03_a_last_line_without_newline_counts_when_it_parses(publisher: Publisher) -> None:
    publisher.fail(faults.NoFinalNewline(), times=None)
    numbers(publisher, 0, range(30))
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == list(range(30))


@pytest.mark.parametrize(
    "fault",
    [
        faults.CutLine(),
        faults.CutLine(after_lines=3),
        faults.ErrorText(),
        faults.ErrorText(after_lines=8),
        faults.Truncate(after_lines=7),
        faults.Truncate(after_bytes=0),
        faults.Truncate(after_lines=6, chunked=True),
        faults.Reset(),
        faults.Reset(after_lines=7),
        faults.BrokenChunk(),
        faults.NoCheckpoint(keep=1),
    ],
    ids=repr,
)
async def test_r03_a_broken_response_neither_loses_nor_repeats_an_event(
    publisher: Publisher, fault: faults.Fault
) -> None:
    numbers(publisher, 0, range(40))
    publisher.fail(fault, times=4)
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == list(range(40))


async def test_r03_events_behind_the_last_checkpoint_are_fetched_again_and_not_delivered_before(
    publisher: Publisher,
) -> None:
    publisher.checkpoint_every = 4
    numbers(publisher, 0, range(10))
    publisher.fail(faults.NoCheckpoint(keep=2))
    async with consume(publisher, limit={"max_batch_bytes": 1}) as consumer:
        batches = consumer.batches()
        first = await next_batch(batches)
        rest = await next_batch(batches)
    assert n_of(first.events) == list(range(8))
    assert n_of(rest.events) == [8, 9]


async def test_r03_a_batch_goes_up_to_the_last_checkpoint_received(
    publisher: Publisher, store: RecordingStore
) -> None:
    publisher.page_size = 1000
    end = numbers(publisher, 0, range(100))
    async with consume(publisher, store=store) as consumer:
        batch = await next_batch(consumer.batches())
    assert n_of(batch.events) == list(range(100))
    assert batch.cursor == end


async def test_r03_what_a_slow_application_has_not_taken_is_joined_into_one_batch(
    publisher: Publisher,
) -> None:
    numbers(publisher, 0, range(100))
    async with consume(publisher) as consumer:
        batches = consumer.batches()
        await next_batch(batches)
        await wait_until(lambda: last_fetch(publisher).cursor == publisher.end_cursor(0))
        assert n_of((await next_batch(batches)).events)[-1] == 99


async def test_r03_a_batch_without_events_counts(
    publisher: Publisher, store: RecordingStore
) -> None:
    end = publisher.append_internal(0, 50)
    async with consume(publisher, store=store, follow=False) as consumer:
        batches = [batch async for batch in _committed(consumer.batches())]
    assert [batch.events for batch in batches] == [[]]
    assert await store.cursors() == {0: end}


async def _committed(batches: object) -> object:
    async for batch in batches:  # type: ignore[attr-defined]
        await batch.commit()
        yield batch


async def test_r03_async_for_commits_cursors_that_move_without_events(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, [1])
    end = publisher.append_internal(0, 5000)
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == [1]
    assert await store.cursors() == {0: end}


async def test_r03_many_events_without_a_checkpoint_are_delivered_while_they_fit(
    publisher: Publisher,
) -> None:
    publisher.page_size, publisher.checkpoint_every = 20_000, 20_000
    numbers(publisher, 0, range(20_000))
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == list(range(20_000))


@pytest.mark.parametrize("partitions", [1, 3])
async def test_r03_too_many_bytes_without_a_checkpoint_are_an_error_that_names_the_limit(
    serve: Callable[..., Publisher], partitions: int
) -> None:
    publisher = serve(partitions, page_size=3, checkpoint_every=3)
    for partition in range(partitions):
        numbers(publisher, partition, range(3))
    publisher.fail(faults.EndlessRun(), times=None)
    async with consume(
        publisher, limit={"max_buffered_bytes": 1_000_000, "max_line_bytes": 100_000}
    ) as consumer:
        with pytest.raises(BufferLimitError, match="max_buffered_bytes") as caught:
            await take(consumer.batches())
    assert caught.value.partition in range(partitions)


async def test_r03_an_endless_line_is_an_error_that_names_the_limit(publisher: Publisher) -> None:
    numbers(publisher, 0, range(3))
    publisher.fail(faults.EndlessLine(), times=None)
    async with consume(publisher, limit={"max_line_bytes": 500_000}) as consumer:
        batches = consumer.batches()
        with pytest.raises(LineTooLongError, match="max_line_bytes"):
            await take(batches, 2)


async def test_r03_long_lines_are_events_like_any_other(publisher: Publisher) -> None:
    payloads = [{"n": n, "text": "\u2028é" * (30_000 * n)} for n in range(1, 8)]
    publisher.extend(0, payloads)
    async with consume(publisher, follow=False) as consumer:
        assert [event.json() for event in await read(consumer)] == payloads


async def test_r03_unknown_commands_and_fields_change_nothing(publisher: Publisher) -> None:
    publisher.fail(
        faults.Both((faults.ExtraFields(), faults.UnknownCommands())), on="fetch", times=None
    )
    publisher.fail(faults.ExtraFields(), on="discovery", times=None)
    numbers(publisher, 0, range(20))
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == list(range(20))


async def test_r03_awkward_cursors_are_sent_back_unchanged(serve: Callable[..., Publisher]) -> None:
    publisher = serve(2, quirks=Quirks(awkward_cursors=True), page_size=3, checkpoint_every=2)
    fill(publisher, 30)
    async with consume(publisher, follow=False) as consumer:
        assert_each_entity_in_order_and_once(
            [event.json() for event in await read(consumer)], publisher
        )


# ---------------------------------------------------------------------- R4


async def test_r04_batches_of_a_partition_come_one_at_a_time_and_in_order(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(3, page_size=4, checkpoint_every=2)
    fill(publisher, 120, entities=12)
    in_flight: set[int] = set()
    payloads = []

    async def handle(batch: Batch) -> None:
        assert batch.partition not in in_flight
        in_flight.add(batch.partition)
        await anyio.sleep(0.001)
        payloads.extend(event.json() for event in batch.events)
        in_flight.discard(batch.partition)

    async with consume(publisher, follow=False, limit={"max_batch_bytes": 1}) as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            await consumer.run(handle)
    assert_each_entity_in_order_and_once(payloads, publisher)


async def test_r04_run_handles_partitions_concurrently(serve: Callable[..., Publisher]) -> None:
    publisher = serve(3)
    for partition in range(3):
        numbers(publisher, partition, [partition])
    handled: set[int] = set()
    all_at_once = anyio.Event()

    async def handle(batch: Batch) -> None:
        if not batch.events:
            return
        handled.add(batch.partition)
        if len(handled) == 3:
            all_at_once.set()
        await all_at_once.wait()

    async with consume(publisher, follow=False) as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            await consumer.run(handle)
    assert handled == {0, 1, 2}


async def test_r04_a_slow_handler_delays_no_other_partition(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(2)
    numbers(publisher, 0, [0])
    seen: list[int] = []

    async def handle(batch: Batch) -> None:
        if batch.partition == 0 and batch.events:
            await anyio.sleep_forever()
        seen.extend(n_of(batch.events))

    async with consume(publisher) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(consumer.run, handle)
        for n in range(1, 6):
            numbers(publisher, 1, [n])
            await wait_until(lambda n=n: n in seen)  # type: ignore[misc]
        tasks.cancel_scope.cancel()
    assert seen == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("last_cursor", ["closed", "never"])
async def test_r04_a_childs_first_batch_comes_only_after_the_parents_last_is_committed(
    serve: Callable[..., Publisher], last_cursor: str
) -> None:
    publisher = serve(1, page_size=10, checkpoint_every=5, quirks=Quirks(last_cursor=last_cursor))  # type: ignore[arg-type]
    numbers(publisher, 0, [0, 1])
    (child,) = publisher.split(0, 1)
    numbers(publisher, child, [2])
    async with consume(publisher) as consumer:
        batches = consumer.batches()
        parent = await next_batch(batches)
        await rediscovered(publisher)
        assert child not in {request.partition for request in publisher.requests}
        assert consumer.status()[child].waits_for == (0,)
        await parent.commit()
        assert n_of((await next_batch(batches)).events) == [2]


async def test_r04_a_child_waits_with_a_report_while_the_parents_last_batch_is_not_committed(
    publisher: Publisher,
) -> None:
    numbers(publisher, 0, [0, 1])
    (child,) = publisher.split(0, 1)
    numbers(publisher, child, [2])
    async with consume(publisher) as consumer:
        batches = consumer.batches()
        parent = await next_batch(batches)
        async with nothing_comes(batches):
            # A stall is never silent.
            await wait_until(lambda: any("not committed" in r for r in consumer.status().reports))
            await rediscovered(publisher)
        assert parent.partition == 0
        assert consumer.status()[child].waits_for == (0,)


async def test_r04_a_late_commit_of_the_parents_last_batch_starts_the_child(
    publisher: Publisher,
) -> None:
    publisher.split(0, 1)
    numbers(publisher, 1, [2])
    publisher.add(9)
    async with consume(publisher) as consumer:
        batches = consumer.batches()
        held = {}
        with anyio.fail_after(SAFETY_LIMIT):
            while set(held) != {0, 9}:
                batch = await anext(batches)
                held[batch.partition] = batch
        numbers(publisher, 9, [5])
        other = await take(batches)
        assert n_of(other[0].events) == [5]
        await held[0].commit()
        assert n_of((await next_batch(batches, 1)).events) == [2]


async def test_r04_unordered_reads_parent_and_child_at_once(publisher: Publisher) -> None:
    publisher.fail(faults.Hang(), partition=0, times=None)
    numbers(publisher, 0, [0])
    publisher.split(0, 1)
    numbers(publisher, 1, [1])
    async with consume(publisher, ordered=False) as consumer:
        assert n_of((await next_batch(consumer.batches())).events) == [1]


async def test_r04_unordered_reads_everything_once(serve: Callable[..., Publisher]) -> None:
    publisher = serve(2, page_size=5, checkpoint_every=2)
    fill(publisher, 40)
    publisher.split(0)
    fill(publisher, 40, start=40)
    publisher.split(1, method="cursor-from")
    fill(publisher, 40, start=80)
    async with consume(publisher, ordered=False, follow=False) as consumer:
        assert sorted(await read_n(consumer)) == list(range(120))


async def test_r04_nested_splits_are_read_parents_first(publisher: Publisher) -> None:
    fill(publisher, 10)
    generations = [0]
    for depth in range(1, 5):
        (child,) = publisher.split(generations[-1], 1)
        generations.append(child)
        fill(publisher, 10, start=depth * 10)
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == list(range(50))


async def test_several_tasks_on_one_iterator_are_refused_as_by_a_generator(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(1)
    async with consume(publisher) as consumer:
        for iterator in (consumer.batches(), consumer.__aiter__()):
            refused: list[RuntimeError] = []

            async def ask(iterator: Any = iterator, refused: list[RuntimeError] = refused) -> None:
                try:
                    await iterator.__anext__()
                except RuntimeError as error:
                    refused.append(error)

            with anyio.fail_after(SAFETY_LIMIT):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(ask)
                    await anyio.lowlevel.checkpoint()
                    tasks.start_soon(ask)
                    while not refused:  # noqa: ASYNC110
                        await anyio.sleep(0.001)
                    publisher.extend(0, [{"n": 1}])
            assert len(refused) == 1
            assert "another task" in str(refused[0])
            publisher.extend(0, [{"n": 2}])
            await iterator.__anext__()  # it goes on
