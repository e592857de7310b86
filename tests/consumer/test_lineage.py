"""R8 starts after, R9 cursor transfer, R10 rediscovery, R11 vanished partitions, R12 bad discovery,
R13 progress: as an application sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

from feedapi_client import (
    AmbiguousLineageError,
    Batch,
    CursorRejectedError,
    FeedKey,
    LineageError,
    LostPartitionError,
    NegotiationError,
    NoProgressError,
    Position,
    ProtocolError,
)
from feedapi_client.testing import Publisher, Quirks, faults
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    SHORT,
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
from tests.positions import stand

pytestmark = pytest.mark.anyio

METHODS = ["starts-after", "cursor-from"]


@pytest.fixture(params=["v2-draft", "v2-token"])
def feed(request: pytest.FixtureRequest, serve: Callable[..., Publisher]) -> Publisher:
    """One partition, in both dialects that have splits."""
    return serve(1, dialect=request.param, page_size=10, checkpoint_every=5)


# ---------------------------------------------------------------------- splits, both methods


@pytest.mark.parametrize("method", METHODS)
async def test_r08_r09_a_split_under_a_running_consumer(feed: Publisher, method: str) -> None:
    fill(feed, 30)
    async with consume(feed) as consumer:
        events = aiter(consumer)
        seen = await take(events, 25)
        children = feed.split(0, 3, method=method)  # type: ignore[arg-type]
        fill(feed, 30, start=30)
        feed.split(children[0], method=method)  # type: ignore[arg-type]
        fill(feed, 30, start=60)
        seen += await take(events, 65)
    assert_each_entity_in_order_and_once([event.json() for event in seen], feed)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("read_before", [0, 7, 30])
async def test_r08_r09_a_split_while_the_consumer_is_down(
    feed: Publisher, store: RecordingStore, method: str, read_before: int
) -> None:
    fill(feed, 30)
    seen = []
    async with consume(feed, store=store, limit={"max_batch_bytes": 1}) as consumer:
        batches = consumer.batches()
        while len(seen) < read_before:
            batch = await next_batch(batches)
            await batch.commit()
            seen += [event.json() for event in batch.events]
    children = feed.split(0, method=method)  # type: ignore[arg-type]
    fill(feed, 10, start=30)
    feed.split(children[1], method=method)  # type: ignore[arg-type]
    fill(feed, 10, start=40)
    async with consume(feed, store=store, follow=False) as consumer:
        seen += [event.json() for event in await read(consumer)]
    assert_each_entity_in_order_and_once(seen, feed)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("committed", [True, False])
async def test_r08_r09_a_split_while_a_batch_is_in_flight(
    feed: Publisher, store: RecordingStore, method: str, committed: bool
) -> None:
    fill(feed, 30)
    async with consume(feed, store=store, limit={"max_batch_bytes": 1}) as consumer:
        batches = consumer.batches()
        in_flight = await next_batch(batches)
        seen = [event.json() for event in in_flight.events] if committed else []
        feed.split(0, method=method)  # type: ignore[arg-type]
        fill(feed, 10, start=30)
        await rediscovered(feed)
        if committed:
            await in_flight.commit()
        elif method == "starts-after":
            return
        while len(seen) < 40:
            batch = await next_batch(batches)
            await batch.commit()
            seen += [event.json() for event in batch.events]
    assert_each_entity_in_order_and_once(seen, feed)


@pytest.mark.parametrize("method", METHODS)
async def test_r08_r09_splits_while_handlers_run_concurrently(
    serve: Callable[..., Publisher], store: RecordingStore, method: str
) -> None:
    feed = serve(3, page_size=6, checkpoint_every=3)
    fill(feed, 60, entities=12)
    seen: list[Any] = []

    async def handle(batch: Batch) -> None:
        await anyio.sleep(0.002)
        seen.extend(event.json() for event in batch.events)

    async with (
        consume(feed, store=store, limit={"max_batch_bytes": 1}) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(consumer.run, handle)
        for step, partition in enumerate((0, 1, 2, 3)):
            await wait_until(lambda step=step: len(seen) > step * 20)  # type: ignore[misc]
            feed.split(partition, method=method)  # type: ignore[arg-type]
            fill(feed, 30, entities=12, start=60 + 30 * step)
        await wait_until(lambda: len(seen) >= 180)
        tasks.cancel_scope.cancel()
    assert_each_entity_in_order_and_once(seen, feed)


async def test_r09_a_slow_handler_delays_no_split_of_another_partition(
    serve: Callable[..., Publisher],
) -> None:
    feed = serve(2)
    numbers(feed, 0, [0])
    seen: list[int] = []
    stuck = anyio.Event()

    async def handle(batch: Batch) -> None:
        if batch.partition == 0 and batch.events:
            stuck.set()
            await anyio.sleep_forever()
        seen.extend(n_of(batch.events))

    async with consume(feed) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(consumer.run, handle)
        await stuck.wait()
        feed.split(0, method="cursor-from")
        (successor,) = feed.split(1, 1, method="cursor-from")
        numbers(feed, successor, [7])
        await wait_until(lambda: seen == [7])
        tasks.cancel_scope.cancel()


async def test_r09_a_superseded_partition_delivers_nothing_while_its_transfer_waits_for_a_save(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    feed = serve(3, page_size=2, checkpoint_every=2)
    numbers(feed, 0, range(100, 140))
    numbers(feed, 1, [1])
    numbers(feed, 2, [2])
    seen = []
    async with consume(feed, store=store, limit={"max_batch_bytes": 1}) as consumer:
        batches = consumer.batches()
        batch = None
        # Until partition 1 is released, and a batch of partition 2 is in flight.
        while batch is None or not {1, 2} <= set(seen) or batch.partition != 2:
            if set(seen) >= {1, 2}:
                numbers(feed, 2, [len(seen)])
            batch = await next_batch(batches)
            await batch.commit()
            seen += n_of(batch.events)
        saving, go_on = anyio.Event(), anyio.Event()

        async def slowly(positions: Any) -> None:
            if 1 in positions:
                saving.set()
                await go_on.wait()

        await wait_until(lambda: consumer.status().buffered_bytes > 0)
        store.before_save = slowly
        feed.close(1)
        with anyio.fail_after(SAFETY_LIMIT):
            await saving.wait()
        successors = feed.split(0, method="cursor-from")
        await wait_until(lambda: successors[0] in consumer.status().partitions)
        assert consumer.status()[0].state == "reading"  # what is not saved is not shown
        async with anyio.create_task_group() as tasks:

            async def go_on_then() -> None:
                await anyio.wait_all_tasks_blocked()
                go_on.set()

            tasks.start_soon(go_on_then)
            while (batch := await next_batch(batches)).partition == 2:
                await batch.commit()
        assert batch.partition in (3, 4)
        await batch.commit()


# ---------------------------------------------------------------------- R8


async def test_r08_a_child_of_an_open_parent_waits_with_one_warning(publisher: Publisher) -> None:
    numbers(publisher, 0, [0])
    publisher.add(1, starts_after=0)
    numbers(publisher, 1, [1])
    async with consume(publisher) as consumer:
        events = aiter(consumer)
        await take(events)
        await rediscovered(publisher, 4)
        status = consumer.status()
        assert status[1].waits_for == (0,)
        warnings = [r for r in status.reports if "partition 1" in r and "open" in r]
        assert len(warnings) == 1
        publisher.close(0)
        assert n_of(await take(events)) == [1]


async def test_r08_without_follow_a_child_of_an_open_parent_does_not_hang(
    publisher: Publisher,
) -> None:
    numbers(publisher, 0, [0])
    publisher.add(1, starts_after=0)
    numbers(publisher, 1, [1])
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == [0]


async def test_r08_a_parent_neither_listed_nor_stored_is_history_at_bootstrap(
    publisher: Publisher,
) -> None:
    publisher.add(5, starts_after=4)
    numbers(publisher, 5, [5])
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == [5]


async def test_r08_history_at_bootstrap_stays_history_after_a_restart(
    publisher: Publisher, store: RecordingStore
) -> None:
    publisher.add(5, starts_after=4)
    async with consume(publisher, store=store):
        pass
    numbers(publisher, 5, [5])
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == [5]


@pytest.mark.parametrize("down", [False, True])
async def test_r08_a_parent_neither_listed_nor_stored_is_lost_after_the_bootstrap(
    publisher: Publisher, store: RecordingStore, down: bool
) -> None:
    if down:
        async with consume(publisher, store=store):
            pass
        publisher.add(5, starts_after=4)
        with pytest.raises(LostPartitionError, match="partition 5") as caught:
            await consume(publisher, store=store).__aenter__()
    else:
        async with consume(publisher, store=store) as consumer:
            events = aiter(consumer)
            publisher.add(5, starts_after=4)
            with pytest.raises(LostPartitionError, match="partition 5") as caught:
                await take(events)
    assert caught.value.partition == 5
    assert 5 not in {request.partition for request in publisher.requests}


async def test_r08_a_parent_that_was_drained_may_leave_the_list(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, [0])
    publisher.split(0, 1)
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == [0]
    publisher.remove(0)
    numbers(publisher, 1, [1])
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == [1]


async def test_r08_a_late_grandchild_of_a_drained_parent_starts_at_its_first_event(
    publisher: Publisher, store: RecordingStore
) -> None:
    publisher.split(0, 1)
    async with consume(publisher, store=store) as consumer:
        await wait_until(lambda: 1 in consumer.status().partitions)
        publisher.add(7, starts_after=0)
        numbers(publisher, 7, [7])
        assert n_of(await take(aiter(consumer))) == [7]


async def test_r08_a_feed_whose_publisher_leaves_out_parent_zero_is_read_whole(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(1, quirks=Quirks(omit_parent_zero=True))
    fill(publisher, 10)
    publisher.split(0)
    fill(publisher, 10, start=10)
    async with consume(publisher, follow=False) as consumer:
        assert sorted(await read_n(consumer)) == list(range(20))


@pytest.mark.parametrize(
    "quirks",
    [Quirks(integer_lineage=True, integer_ids=True), Quirks(old_lineage_names=True)],
    ids=["integers", "old names"],
)
@pytest.mark.parametrize("method", METHODS)
async def test_r08_r09_lineage_is_read_in_each_spelling_that_publishers_use(
    serve: Callable[..., Publisher], quirks: Quirks, method: str
) -> None:
    publisher = serve(1, quirks=quirks, page_size=4, checkpoint_every=2)
    fill(publisher, 20)
    publisher.split(0, method=method)  # type: ignore[arg-type]
    fill(publisher, 20, start=20)
    async with consume(publisher, follow=False) as consumer:
        assert_each_entity_in_order_and_once(
            [event.json() for event in await read(consumer)], publisher
        )


# ---------------------------------------------------------------------- R9


async def test_r09_children_and_the_superseded_ancestor_are_saved_in_one_save(
    publisher: Publisher, store: RecordingStore
) -> None:
    cursor = numbers(publisher, 0, [0])
    async with consume(publisher, store=store, follow=False) as consumer:
        await read_n(consumer)
    publisher.split(0, 3, method="cursor-from")
    store.saves.clear()
    async with consume(publisher, store=store):
        pass
    assert [stand(positions) for positions in store.saves] == [
        {0: (cursor, "superseded"), **dict.fromkeys((1, 2, 3), (cursor, "open"))}
    ]


async def test_r09_a_crash_right_after_the_transfer_loses_nothing(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 10)
    async with consume(publisher, store=store, follow=False) as consumer:
        await read_n(consumer)
    publisher.split(0, method="cursor-from")
    async with consume(publisher, store=store):
        pass
    fill(publisher, 10, start=10)
    for expected in (range(10, 20), []):
        async with consume(publisher, store=store, follow=False) as consumer:
            assert sorted(await read_n(consumer)) == list(expected)


async def test_r09_the_nearest_ancestor_with_a_position_counts(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 10)
    seen = []
    async with consume(publisher, store=store, follow=False) as consumer:
        seen += await read_n(consumer)
    left, _ = publisher.split(0, method="cursor-from")
    fill(publisher, 10, start=10)
    async with consume(publisher, store=store, follow=False) as consumer:
        seen += await read_n(consumer)
    publisher.split(left, method="cursor-from")
    fill(publisher, 10, start=20)
    async with consume(publisher, store=store, follow=False) as consumer:
        seen += await read_n(consumer)
    assert sorted(seen) == list(range(30))


async def test_r09_a_successor_that_is_listed_late_gets_the_same_cursor(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, [0])
    async with consume(publisher, store=store, follow=False) as consumer:
        await read_n(consumer)
    cursor = publisher.end_cursor(0)
    publisher.remove(0)
    publisher.add(1, cursor_from=[0])
    async with consume(publisher, store=store):
        pass
    publisher.add(2, cursor_from=[0])
    async with consume(publisher, store=store):
        pass
    assert await store.cursors() == {0: cursor, 1: cursor, 2: cursor}


@pytest.mark.parametrize("down", [False, True])
async def test_r09_a_merge_of_ancestors_at_different_cursors_is_ambiguous(
    serve: Callable[..., Publisher], store: RecordingStore, down: bool
) -> None:
    publisher = serve(2)
    numbers(publisher, 0, [0])
    numbers(publisher, 1, [1])
    async with consume(publisher, store=store, follow=False) as consumer:
        await read_n(consumer)
    if down:
        publisher.merge([0, 1])
        with pytest.raises(AmbiguousLineageError, match="partition 2"):
            await consume(publisher, store=store).__aenter__()
    else:
        async with consume(publisher, store=store) as consumer:
            events = aiter(consumer)
            publisher.merge([0, 1])
            with pytest.raises(AmbiguousLineageError, match="partition 2"):
                await take(events)
    assert set(await store.positions()) == {0, 1}


async def test_r09_a_merge_with_one_live_ancestor_takes_its_cursor(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 10)
    async with consume(publisher, store=store, follow=False) as consumer:
        await read_n(consumer)
    publisher.merge(publisher.split(0, method="cursor-from"))
    fill(publisher, 10, start=10)
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == list(range(10, 20))


async def test_r09_no_ancestor_with_a_position_is_read_from_the_first_event(
    publisher: Publisher, store: RecordingStore
) -> None:
    async with consume(publisher, store=store):
        pass
    publisher.add(5, cursor_from=[3, 4])
    numbers(publisher, 5, [5])
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == [5]
        (report,) = consumer.status().reports
        assert "partition 5: begins at its first event" in report


class CancellingStore(RecordingStore):
    """Cancels the caller of the next save, which goes through."""

    scope: anyio.CancelScope | None = None

    async def save(self, feed: FeedKey, positions: Mapping[int, Position], **more: Any) -> None:
        await super().save(feed, positions, **more)
        if self.scope is not None:
            self.scope.cancel()


@pytest.mark.parametrize("iterated", [False, True], ids=["entry", "second-iteration"])
async def test_r09_a_report_survives_that_its_entry_is_cancelled_after_the_save(
    publisher: Publisher, iterated: bool
) -> None:
    store = CancellingStore()
    consumer = consume(publisher, store=store, follow=False)
    if not iterated:
        async with consume(publisher, store=store):
            pass
    async with AsyncExitStack() as block:
        if iterated:
            await block.enter_async_context(consumer)
            await read_n(consumer)
        publisher.add(5, cursor_from=[3, 4])
        with anyio.CancelScope() as store.scope:
            if iterated:
                await read_n(consumer)
            else:
                async with consumer:
                    await anyio.lowlevel.checkpoint()
        assert store.scope.cancelled_caught
        store.scope = None
        assert (await store.positions())[5].cursor == "_first"
        numbers(publisher, 5, [5])
        shown = {*consumer.status().reports}  # where the cancellation came after the opening
        if not iterated:
            await block.enter_async_context(consumer)
        assert await read_n(consumer) == [5]
        (report,) = shown | {*consumer.status().reports}
        assert "partition 5: begins at its first event" in report
        await read_n(consumer)
        assert consumer.status().reports == ()  # of another iteration


@pytest.mark.parametrize("down", [False, True])
async def test_r09_history_is_not_silently_read_again_when_a_partition_is_lost(
    publisher: Publisher, store: RecordingStore, down: bool
) -> None:
    numbers(publisher, 0, [0])
    async with consume(publisher, store=store, follow=False) as consumer:
        await read_n(consumer)

    def lose() -> None:
        publisher.remove(0)
        publisher.add(5, cursor_from=[3])

    if down:
        lose()
    async with consume(publisher, store=store) as consumer:
        if not down:
            lose()
        with pytest.raises(LostPartitionError, match="partition 5"):
            await take(aiter(consumer))
    assert 5 not in {request.partition for request in publisher.requests}


async def test_r09_an_ancestor_that_stays_listed_is_superseded_too(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, [0])
    async with consume(publisher, store=store, follow=False) as consumer:
        await read_n(consumer)
    publisher.add(1, cursor_from=[0])
    publisher.clear_requests()
    async with consume(publisher, store=store, follow=False) as consumer:
        await read_n(consumer)
        assert consumer.status()[0].state == "superseded"
    assert await store.statuses() == {0: "superseded", 1: "open"}
    assert 0 not in {request.partition for request in publisher.requests}


async def test_r09_a_superseded_partition_has_no_error_of_requests_before(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, [0])
    async with consume(publisher, store=store) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(read_n, consumer)
        await wait_until(lambda: consumer.status()[0].caught_up is True)
        publisher.fail(503, on="fetch", times=None)
        await wait_until(lambda: consumer.status()[0].error is not None)
        publisher.split(0, into=(1,), method="cursor-from")
        await wait_until(lambda: consumer.status()[0].state == "superseded")
        status = consumer.status()[0]
        assert (status.error, status.since, status.retry_at) == (None, None, None)
        assert status.fetch_failures > 0
        tasks.cancel_scope.cancel()


async def test_r09_at_bootstrap_the_successors_hold_the_whole_history(publisher: Publisher) -> None:
    fill(publisher, 20)
    publisher.split(0, method="cursor-from")
    fill(publisher, 20, start=20)
    async with consume(publisher, follow=False) as consumer:
        assert_each_entity_in_order_and_once(
            [event.json() for event in await read(consumer)], publisher
        )


# ---------------------------------------------------------------------- R10


async def test_r10_a_409_leads_to_a_discovery_and_the_new_token(publisher: Publisher) -> None:
    async with consume(publisher, limit={"discovery_interval": 3600}) as consumer:
        events = aiter(consumer)
        for n in range(5):
            token = publisher.rotate_token()
            numbers(publisher, 0, [n])
            assert n_of(await take(events)) == [n]
            assert last_fetch(publisher).token == token
    assert publisher.counters["discovery"] <= 12


async def test_r10_all_partitions_go_on_with_the_new_token(serve: Callable[..., Publisher]) -> None:
    publisher = serve(30)
    async with consume(publisher, limit={"discovery_interval": 3600}) as consumer:
        events = aiter(consumer)
        for partition in range(30):
            numbers(publisher, partition, [partition])
        assert sorted(n_of(await take(events, 30))) == list(range(30))
        publisher.rotate_token()
        for partition in range(30):
            numbers(publisher, partition, [100 + partition])
        assert sorted(n_of(await take(events, 30))) == list(range(100, 130))


async def test_r10_a_few_409_in_a_row_are_survived(publisher: Publisher) -> None:
    publisher.fail(409, times=4)
    numbers(publisher, 0, [0])
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == [0]


async def test_r10_a_409_that_persists_with_a_fresh_token_is_a_protocol_error(
    publisher: Publisher,
) -> None:
    publisher.fail(409, times=None)
    async with consume(publisher, retry=SHORT) as consumer:
        events = aiter(consumer)
        with pytest.raises(ProtocolError, match="409") as caught:
            await take(events)
    assert caught.value.partition == 0
    assert "while discovery lists the partition" in str(caught.value)
    assert publisher.counters["discovery"] >= 2
    assert publisher.counters["fetch"] >= 2


@pytest.mark.parametrize("status", [400, 404, 410])
async def test_r10_a_temporary_refusal_loses_and_repeats_nothing(
    publisher: Publisher, status: int
) -> None:
    numbers(publisher, 0, [0])
    publisher.fail(status)
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == [0]


@pytest.mark.parametrize("status", [400, 404, 410])
async def test_r10_a_listed_partition_that_refuses_its_cursor_for_long_is_cursor_rejected(
    publisher: Publisher, status: int
) -> None:
    async with consume(publisher, retry=SHORT) as consumer:
        events = aiter(consumer)
        cursor = numbers(publisher, 0, [0])
        await take(events)
        publisher.fail(status, times=None)
        with pytest.raises(CursorRejectedError, match=str(status)) as caught:
            await take(events)
    assert caught.value.partition == 0
    said, ours = caught.value.message.split("It has done so")
    assert said.startswith("the publisher answers"), "the publisher's words come first"
    assert cursor in ours


@pytest.mark.parametrize("status", [400, 404, 410])
async def test_r10_at_the_first_cursor_a_refusal_is_never_the_cursors_fault(
    publisher: Publisher, status: int
) -> None:
    publisher.fail(status, times=None)
    async with consume(publisher, retry=SHORT) as consumer:
        with pytest.raises(ProtocolError, match=f"{status}.*_first") as caught:
            await take(aiter(consumer))
    assert not isinstance(caught.value, CursorRejectedError)


async def test_r10_a_drained_partition_leads_to_a_discovery(publisher: Publisher) -> None:
    numbers(publisher, 0, [0])
    publisher.close(0)
    async with consume(publisher, limit={"discovery_interval": 3600}) as consumer:
        events = aiter(consumer)
        await take(events)
        publisher.quirks = Quirks(keep_token=True)
        publisher.add(1, starts_after=0)
        numbers(publisher, 1, [1])
        assert n_of(await take(events)) == [1]


async def test_r10_discovery_is_repeated_at_its_interval(publisher: Publisher) -> None:
    async with (
        consume(publisher, limit={"discovery_interval": 0.02}) as consumer,
        nothing_comes(aiter(consumer)),
    ):
        await wait_until(lambda: publisher.counters["discovery"] >= 6)


@pytest.mark.parametrize("seconds_between", [0.001, 3600])
async def test_r10_an_unknown_command_leads_to_a_discovery_at_a_limited_rate(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, seconds_between: float
) -> None:
    monkeypatch.setattr(
        "feedapi_client.runtime.discovery_timer.UNKNOWN_COMMAND_GAP_SECONDS", seconds_between
    )
    publisher.fail(faults.UnknownCommands(), times=None)
    quick = {"discovery_interval": 3600, "max_poll_interval": 0.005}
    async with (
        consume(publisher, limit=quick) as consumer,
        nothing_comes(aiter(consumer)),
    ):
        await wait_until(lambda: publisher.counters["fetch"] >= 20)
        if seconds_between < 1:
            await wait_until(lambda: publisher.counters["discovery"] >= 3)
        else:
            assert publisher.counters["discovery"] == 1


async def test_r10_a_v1_partition_count_that_is_wrong_is_an_error(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(4, dialect="v1")
    async with consume(publisher, v1_partitions=2, retry=SHORT) as consumer:
        with pytest.raises(ProtocolError, match="partition count is 4"):
            await take(aiter(consumer))


# ---------------------------------------------------------------------- R11


async def test_r11_a_vanished_partition_keeps_its_position_stops_and_is_reported(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(2)
    cursor = numbers(publisher, 0, [0])
    async with consume(publisher, store=store) as consumer:
        events = aiter(consumer)
        await take(events)
        numbers(publisher, 1, [1])
        await take(events)
        publisher.remove(0)
        await wait_until(
            lambda: any(
                "partition 0" in report and "no longer listed" in report
                for report in consumer.status().reports
            )
        )
        assert consumer.status()[0].state == "vanished"
        numbers(publisher, 1, [2])
        assert n_of(await take(events)) == [2]
    assert stand(await store.positions())[0] == (cursor, "open")


async def test_r11_a_partition_that_comes_back_is_read_on(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, [0])
    async with consume(publisher, store=store) as consumer:
        events = aiter(consumer)
        await take(events)
        async with nothing_comes(events):
            await wait_until(lambda: consumer.status()[0].caught_up)
        publisher.remove(0)
        await wait_until(lambda: consumer.status()[0].state == "vanished")
        publisher.add(0)
        numbers(publisher, 0, [1])
        assert n_of(await take(events)) == [1]


async def test_r11_a_child_whose_undrained_parent_vanishes_is_a_lost_partition(
    publisher: Publisher,
) -> None:
    numbers(publisher, 0, [0])
    publisher.split(0, 1)
    publisher.fail(503, partition=0, times=None)
    async with consume(publisher) as consumer:
        events = aiter(consumer)
        publisher.remove(0)
        with pytest.raises(LostPartitionError, match="partition 1"):
            await take(events)


async def test_r11_without_follow_a_feed_whose_partitions_vanished_ends(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, [0])
    async with consume(publisher, store=store):
        pass
    publisher.remove(0)
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == []


# ---------------------------------------------------------------------- R12

BAD_PARTITIONS: dict[str, Any] = {
    "duplicate id": [{"id": "0"}, {"id": "0"}],
    "id too large": [{"id": "32768"}],
    "negative id": [{"id": "-1"}],
    "fractional id": [{"id": 1.5}],
    "no id": [{}],
    "cycle": [{"id": "0", "startsAfterPartition": "1"}, {"id": "1", "startsAfterPartition": "0"}],
    "cycle of both methods": [
        {"id": "0", "startsAfterPartition": "1"},
        {"id": "1", "cursorFromPartitions": ["0"]},
    ],
    "self-parent": [{"id": "0", "startsAfterPartition": "0"}],
    "own ancestor": [{"id": "0", "cursorFromPartitions": ["0"]}],
    "both mechanisms": [
        {"id": "0"},
        {"id": "1", "startsAfterPartition": "0", "cursorFromPartitions": ["0"]},
    ],
    "not an object": ["0"],
    "closed is no boolean": [{"id": "0", "closed": "yes"}],
}


@pytest.mark.parametrize("partitions", BAD_PARTITIONS.values(), ids=BAD_PARTITIONS)
async def test_r12_bad_discovery_is_an_error_on_entry(
    publisher: Publisher, store: RecordingStore, partitions: list[Any]
) -> None:
    publisher.fail(
        faults.Edit(lambda found: found | {"partitions": partitions}), on="discovery", times=None
    )
    with pytest.raises((LineageError, ProtocolError), match="partition"):
        await consume(publisher, store=store).__aenter__()
    assert store.saves == []


@pytest.mark.parametrize("partitions", BAD_PARTITIONS.values(), ids=BAD_PARTITIONS)
async def test_r12_a_running_consumer_keeps_its_last_good_topology_reports_and_tries_again(
    publisher: Publisher, partitions: list[Any]
) -> None:
    async with consume(publisher, limit={"discovery_interval": 0.01}) as consumer:
        events = aiter(consumer)
        numbers(publisher, 0, [0])
        await take(events)
        publisher.fail(
            faults.Edit(lambda found: found | {"partitions": partitions}),
            on="discovery",
            times=None,
        )
        await wait_until(lambda: consumer.status().reports)
        assert "last good topology" in consumer.status().reports[0]
        numbers(publisher, 0, [1])
        assert n_of(await take(events)) == [1]
        publisher.heal()
        publisher.add(1)
        numbers(publisher, 1, [2])
        assert n_of(await take(events)) == [2]


@pytest.mark.parametrize(
    "fault",
    [
        faults.Html(),
        faults.Status(404),
        faults.Status(401),
        faults.Status(500),
        faults.Replace([]),
        faults.Reset(),
    ],
    ids=repr,
)
async def test_r12_a_running_consumer_survives_any_failed_discovery(
    publisher: Publisher, fault: faults.Fault
) -> None:
    async with consume(publisher, limit={"discovery_interval": 0.01}) as consumer:
        events = aiter(consumer)
        numbers(publisher, 0, [0])
        await take(events)
        publisher.fail(fault, on="discovery", times=None)
        await wait_until(lambda: publisher.counters["discovery"] >= 4)
        numbers(publisher, 0, [1])
        assert n_of(await take(events)) == [1]
        publisher.heal()
        publisher.split(0)
        numbers(publisher, 1, [2])
        assert n_of(await take(events)) == [2]


async def test_r10_a_discovery_that_something_needs_and_that_stays_no_feed_is_an_error(
    publisher: Publisher,
) -> None:
    async with consume(publisher, retry=SHORT) as consumer:
        events = aiter(consumer)
        publisher.fail(faults.Html(), on="discovery", times=None)
        publisher.rotate_token()
        with pytest.raises(NegotiationError):
            await take(events)


# ---------------------------------------------------------------------- R13


@pytest.mark.parametrize("fault", [faults.NoCheckpoint(), faults.SameCheckpoint()], ids=repr)
async def test_r13_events_without_a_new_cursor_are_retried_and_then_no_progress(
    publisher: Publisher, fault: faults.Fault
) -> None:
    numbers(publisher, 0, [0, 1])
    publisher.fail(fault, times=None)
    async with consume(publisher) as consumer:
        with pytest.raises(NoProgressError, match="partition 0"):
            await take(aiter(consumer))
    assert 2 <= publisher.counters["fetch"] <= 10


@pytest.mark.parametrize("fault", [faults.NoCheckpoint(), faults.SameCheckpoint()], ids=repr)
async def test_r13_a_publisher_that_recovers_in_time_repeats_nothing(
    publisher: Publisher, fault: faults.Fault
) -> None:
    numbers(publisher, 0, range(20))
    publisher.fail(fault, times=3)
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == list(range(20))


async def test_r13_after_an_empty_response_of_an_open_partition_the_next_poll_waits(
    publisher: Publisher,
) -> None:
    publisher.fail(faults.Replace(b""), times=None)
    async with (
        consume(publisher, limit={"poll_interval": 3600}) as consumer,
        nothing_comes(aiter(consumer)),
    ):
        await wait_until(lambda: publisher.counters["fetch"] >= 1)
        await rediscovered(publisher, 5)
    assert publisher.counters["fetch"] == 1
