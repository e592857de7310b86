"""`Limits.commit_interval`: commits that the consumer makes itself are saved together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import pytest

from feedapi_client import (
    Batch,
    FeedConsumer,
    FeedKey,
    FencedError,
    MemoryCursorStore,
    Position,
    Quarantine,
    Retry,
    Share,
    StoreError,
)
from feedapi_client.quarantine.quarantine_store import MemoryQuarantineStore
from feedapi_client.testing import Publisher
from feedapi_client.testing.publisher.log_position import decode
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    RecordingStore,
    Transaction,
    assert_each_entity_in_order_and_once,
    consume,
    fill,
    n_of,
    numbers,
    read,
    rediscovered,
    take,
    wait_until,
)

pytestmark = pytest.mark.anyio

NEVER = 3600.0
"""An interval that no test waits for."""


def gathering(publisher: Publisher, interval: float = NEVER, **options: Any) -> FeedConsumer:
    limit = {"commit_interval": interval, "max_batch_events": 5}
    return consume(publisher, limit=limit, **options)


class Application:
    """Notes what it handles, and waits where it is to."""

    def __init__(self) -> None:
        self.payloads: list[Any] = []
        self.waits_at: dict[int, anyio.Event] = {}

    async def __call__(self, batch: Batch) -> None:
        for event in batch:
            payload = event.json()
            if payload["n"] in self.waits_at:
                await self.waits_at[payload["n"]].wait()
            self.payloads.append(payload)

    @property
    def numbers(self) -> list[int]:
        return [payload["n"] for payload in self.payloads]


async def run(consumer: FeedConsumer, handle: Any, **options: Any) -> None:
    with anyio.fail_after(SAFETY_LIMIT):
        await consumer.run(handle, **options)


def events_of(position: Position) -> int:
    """How many events are before the cursor, if they were published first."""
    return 0 if position.cursor == "_first" else decode(position.cursor).base


def revisions(store: RecordingStore) -> dict[int, int]:
    """The revision of each partition: how often it was saved."""
    return {
        partition: position.revision
        for positions in store._feeds.values()
        for partition, position in positions.items()
    }


@pytest.mark.parametrize("way", ["run", "loop"])
async def test_r05_all_partitions_are_saved_at_once(
    serve: Callable[..., Publisher], store: RecordingStore, way: str
) -> None:
    publisher = serve(4, page_size=10, checkpoint_every=5)
    fill(publisher, 200, entities=20)
    application = Application()
    async with gathering(publisher, store=store, follow=False) as consumer:
        before = len(store.saves)
        if way == "run":
            await run(consumer, application)
        else:
            with anyio.fail_after(SAFETY_LIMIT):
                application.payloads += [event.json() async for event in consumer]
    assert len(store.saves) == before + 1
    assert sorted(store.saves[-1]) == [0, 1, 2, 3]
    assert_each_entity_in_order_and_once(application.payloads, publisher)
    async with gathering(publisher, store=store, follow=False) as consumer:
        assert [event async for event in consumer] == []


async def test_r05_a_batch_is_saved_after_the_interval_while_the_next_one_is_handled(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(15))
    application = Application()
    application.waits_at[12] = anyio.Event()
    async with (
        gathering(publisher, 0.05, store=store) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(run, consumer, application)
        await wait_until(lambda: 11 in application.numbers)
        await wait_until(lambda: events_of(store.saves[-1][0]) == 10)
        application.waits_at[12].set()
        await wait_until(lambda: events_of(store.saves[-1][0]) == 15)
        consumer.stop()


async def test_r05_nothing_is_saved_before_the_interval_and_a_stop_saves_it(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(15))
    application = Application()
    application.waits_at[12] = anyio.Event()
    async with gathering(publisher, store=store) as consumer, anyio.create_task_group() as tasks:
        before = len(store.saves)
        tasks.start_soon(run, consumer, application)
        await wait_until(lambda: 11 in application.numbers)
        assert len(store.saves) == before
        consumer.stop()
        application.waits_at[12].set()
    assert [events_of(positions[0]) for positions in store.saves[before:]] == [15]


async def test_r20_a_cancelled_run_saves_what_was_handled(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(15))
    application = Application()
    application.waits_at[12] = anyio.Event()
    async with gathering(publisher, store=store) as consumer:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, consumer, application)
            await wait_until(lambda: 11 in application.numbers)
            tasks.cancel_scope.cancel()
        assert events_of(store.saves[-1][0]) == 10


async def test_r05_what_other_partitions_have_handled_is_saved_when_a_handler_fails(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(2, page_size=10, checkpoint_every=5)
    numbers(publisher, 0, range(5))
    numbers(publisher, 1, range(100, 105))
    handled = anyio.Event()

    async def handle(batch: Batch) -> None:
        if batch.partition == 0:
            handled.set()
        else:
            await handled.wait()
            await anyio.wait_all_tasks_blocked()
            raise ZeroDivisionError

    async with gathering(publisher, store=store) as consumer:
        with pytest.raises(ZeroDivisionError):
            await run(consumer, handle)
    assert events_of(store.saves[-1][0]) == 5
    assert revisions(store)[1] == 1


@pytest.mark.parametrize("how", ["break", "exception", "next iteration", "cancelled"])
async def test_r05_leaving_a_loop_saves_what_was_handled(
    publisher: Publisher, store: RecordingStore, how: str
) -> None:
    numbers(publisher, 0, range(15))
    seen: list[int] = []

    async def loop(consumer: FeedConsumer) -> None:
        async for event in consumer:
            seen.append(event.json()["n"])
            if seen[-1] == 11:
                if how == "exception":
                    raise ZeroDivisionError
                if how == "cancelled":
                    await anyio.sleep_forever()
                return

    with anyio.fail_after(SAFETY_LIMIT):
        if how == "cancelled":
            async with anyio.create_task_group() as tasks:

                async def consume_all() -> None:
                    async with gathering(publisher, store=store) as consumer:
                        await loop(consumer)

                tasks.start_soon(consume_all)
                await wait_until(lambda: 11 in seen)
                tasks.cancel_scope.cancel()
        else:
            try:
                async with gathering(publisher, store=store, follow=False) as consumer:
                    await loop(consumer)
                    if how == "next iteration":
                        assert n_of([event async for event in consumer]) == [10, 11, 12, 13, 14]
            except ZeroDivisionError:
                assert how == "exception"
    last = 15 if how == "next iteration" else 10
    assert events_of(store.saves[-1][0]) == last


async def test_r05_a_batch_that_the_application_commits_is_saved_at_once_with_those_before_it(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(15))
    transactions: list[Transaction] = []

    async def handle(batch: Batch) -> None:
        if batch.events[0].json()["n"] == 5:
            rolled_back, transaction = Transaction(), Transaction()
            await batch.commit(transaction=rolled_back)
            await batch.commit(transaction=transaction)
            await store.commit(transaction)
            transactions.append(transaction)

    async with gathering(publisher, store=store, follow=False) as consumer:
        before = len(store.saves)
        await run(consumer, handle)
    cursors = [events_of(positions[0]) for positions in store.saves[before:]]
    assert cursors == [10, 15]
    assert [change[1][0].revision for change in transactions[0].changes] == [2]


async def test_r05_a_commit_of_the_application_waits_for_a_save_under_way(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(10))
    saving, through = anyio.Event(), anyio.Event()
    second = anyio.Event()

    async def slow(positions: Mapping[int, Position]) -> None:
        if positions[0].revision == 2:
            saving.set()
            await through.wait()

    async def handle(batch: Batch) -> None:
        if batch.events[0].json()["n"] == 5:
            second.set()
            await saving.wait()
            await batch.commit()

    async with (
        gathering(publisher, 0.01, store=store) as consumer,
        anyio.create_task_group() as tasks,
    ):
        store.before_save = slow
        tasks.start_soon(run, consumer, handle)
        await saving.wait()
        await second.wait()
        await anyio.wait_all_tasks_blocked()
        through.set()
        await wait_until(lambda: store.saves[-1][0].revision == 3)
        consumer.stop()
    assert events_of(store.saves[-1][0]) == 10


async def test_r05_nothing_is_saved_of_a_batch_in_a_transaction(
    publisher: Publisher, store: RecordingStore
) -> None:
    """The database may make that save wait for the transaction, and that one waits for the save."""
    numbers(publisher, 0, range(20))
    application = Application()
    application.waits_at[12] = anyio.Event()

    async def handle(batch: Batch) -> None:
        await application(batch)
        if application.numbers[-1] == 4:
            transaction = Transaction()
            await batch.commit(transaction=transaction)
            await store.commit(transaction)

    async with (
        gathering(publisher, 0.05, store=store) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(run, consumer, handle)
        await wait_until(lambda: 11 in application.numbers)
        before = len(store.saves)
        await anyio.sleep(0.2)
        assert len(store.saves) == before
        application.waits_at[12].set()
        await wait_until(lambda: events_of(store.saves[-1][0]) == 20)
        consumer.stop()


@pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
async def test_r04_children_do_not_wait_for_the_interval(
    serve: Callable[..., Publisher], store: RecordingStore, method: Any
) -> None:
    publisher = serve(page_size=7, checkpoint_every=3)
    fill(publisher, 50)
    application = Application()
    async with gathering(publisher, store=store) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(run, consumer, application)
        await wait_until(lambda: len(application.payloads) == 50)
        publisher.split(0, method=method)
        fill(publisher, 50, start=50)
        await wait_until(lambda: len(application.payloads) == 100)
        consumer.stop()
    assert_each_entity_in_order_and_once(application.payloads, publisher)


@pytest.mark.parametrize("way", ["run", "loop"])
async def test_r05_a_save_that_fails_ends_the_iteration(
    publisher: Publisher, store: RecordingStore, way: str
) -> None:
    numbers(publisher, 0, range(5))

    async def fails(positions: Mapping[int, Position]) -> None:
        raise ConnectionError

    async with gathering(publisher, 0.01, store=store) as consumer:
        store.before_save = fails
        with pytest.raises(StoreError):
            await (run(consumer, Application()) if way == "run" else read(consumer))


@pytest.mark.parametrize("way", ["run", "loop", "exit"])
async def test_r05_the_last_save_fails_aloud(
    publisher: Publisher, store: RecordingStore, way: str
) -> None:
    numbers(publisher, 0, range(10))

    async def fails(positions: Mapping[int, Position]) -> None:
        raise ConnectionError

    async def consume_all() -> None:
        async with gathering(publisher, store=store, follow=False) as consumer:
            store.before_save = fails
            if way == "run":
                await run(consumer, Application())
            elif way == "loop":
                await read(consumer)
            else:
                await take(aiter(consumer), 8)

    with pytest.raises(StoreError):
        await consume_all()


async def test_r14_a_save_is_retried_as_the_handler_is(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(5))
    failures = 3

    async def fails(positions: Mapping[int, Position]) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise ConnectionError

    application = Application()
    async with (
        gathering(publisher, 0.01, store=store) as consumer,
        anyio.create_task_group() as tasks,
    ):
        store.before_save = fails
        again = Retry(attempts=10, base_delay=0.001, max_delay=0.002)
        tasks.start_soon(lambda: run(consumer, application, on_failure=again))
        await wait_until(lambda: revisions(store)[0] == 2)
        consumer.stop()
    assert application.numbers == list(range(5))


async def test_r05_a_quarantined_event_is_saved_with_its_cursor_at_once(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(15))
    quarantine = MemoryQuarantineStore()
    application = Application()
    application.waits_at[12] = anyio.Event()

    async def handle(batch: Batch) -> None:
        if 7 in n_of(batch):
            raise ZeroDivisionError
        await application(batch)

    policy = Quarantine(to=quarantine)
    async with gathering(publisher, store=store) as consumer, anyio.create_task_group() as tasks:
        before = len(store.saves)
        tasks.start_soon(lambda: run(consumer, handle, on_failure=policy))
        await wait_until(lambda: 11 in application.numbers)
        assert [events_of(p[0]) for p in store.saves[before:]] == [10]
        consumer.stop()
        application.waits_at[12].set()
    assert events_of(store.saves[-1][0]) == 15


async def test_r17_a_consumer_that_was_replaced_ends_with_its_next_save(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(5))
    application = Application()

    async def replace(consumer: FeedConsumer) -> None:
        await wait_until(lambda: len(application.payloads) == 5)
        async with consume(publisher, store=store, follow=False) as other:
            await run(other, Application())
        consumer.stop()

    async with gathering(publisher, store=store) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(replace, consumer)
        with pytest.raises(FencedError):
            await run(consumer, application)


async def test_r17_a_hand_over_saves_first_and_repeats_nothing(
    serve: Callable[..., Publisher],
) -> None:
    publisher, store = serve(2, page_size=10, checkpoint_every=5), MemoryCursorStore()
    fill(publisher, 100, entities=10)
    share = Share(lease_seconds=60, rebalance_seconds=0.05, handover_seconds=60)
    application = Application()
    first = gathering(publisher, store=store, share=share)
    second = gathering(publisher, store=store, share=share)
    async with first, second, anyio.create_task_group() as tasks:
        tasks.start_soon(run, first, application)
        await wait_until(lambda: len(application.payloads) == 100)
        tasks.start_soon(run, second, application)
        await wait_until(lambda: len({p.owner for p in first.status().partitions.values()}) == 2)
        fill(publisher, 100, entities=10, start=100)
        await wait_until(lambda: len(application.payloads) >= 200)
        await rediscovered(publisher)
        first.stop()
        second.stop()
    assert_each_entity_in_order_and_once(application.payloads, publisher)


async def test_r17_a_lost_lease_holds_up_no_other_partition(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(2, page_size=10, checkpoint_every=5)
    fill(publisher, 40, entities=10)
    share = Share(lease_seconds=60, rebalance_seconds=20)
    application = Application()
    async with (
        gathering(publisher, store=store, share=share) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(run, consumer, application)
        await wait_until(lambda: len(application.payloads) == 40)
        moved = await store.load(consumer.key)
        await store.save(consumer.key, {0: moved[0].advance()})
        consumer.stop()
    stored = await store.load(consumer.key)
    assert stored[0] == moved[0].advance()
    assert stored[1].cursor == publisher.end_cursor(1)


async def test_r08_a_partition_whose_gathered_commit_was_refused_goes_on(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(1, page_size=10, checkpoint_every=5)
    numbers(publisher, 0, range(10))
    share = Share(lease_seconds=60, rebalance_seconds=0.05)
    application = Application()
    async with (
        gathering(publisher, store=store, share=share) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(run, consumer, application)
        await wait_until(lambda: application.numbers == list(range(10)))
        stored = await store.load(consumer.key)
        await store.save(consumer.key, {0: stored[0].advance(publisher.end_cursor(0))})
        child = publisher.split(0, method="starts-after")[0]
        numbers(publisher, child, range(10, 15))
        await wait_until(lambda: application.numbers == list(range(15)))
        consumer.stop()


async def test_r17_what_was_gathered_is_saved_before_the_leases_are_given_away(
    publisher: Publisher,
) -> None:
    numbers(publisher, 0, range(15))
    log: list[object] = []

    class Store(RecordingStore):
        async def save(self, feed: FeedKey, positions: Any, **options: Any) -> None:
            await super().save(feed, positions, **options)
            log.append(events_of(positions[0]))

        async def leave(self, feed: FeedKey, instance: str) -> None:
            log.append("left")
            await super().leave(feed, instance)

    async def stop(consumer: FeedConsumer) -> None:
        await wait_until(lambda: log[-1:] == [12])
        consumer.stop(grace=0.01)

    with anyio.fail_after(SAFETY_LIMIT):
        async with (
            anyio.create_task_group() as tasks,
            gathering(publisher, store=Store(), share=Share()) as consumer,
        ):
            tasks.start_soon(stop, consumer)
            async for event in consumer:
                if event.json()["n"] == 12:
                    log.append(12)
                    try:
                        await anyio.sleep_forever()
                    finally:  # an application that takes its time
                        with anyio.CancelScope(shield=True):
                            await wait_until(lambda: log[-1] == "left")
    assert log[-3:] == [12, 10, "left"]


async def test_r20_a_cancellation_of_the_last_save_closes_the_consumer(
    publisher: Publisher, store: RecordingStore, anyio_backend_name: str
) -> None:
    numbers(publisher, 0, range(10))
    saving, tasks_before = anyio.Event(), len(anyio.get_running_tasks())
    consumer = gathering(publisher, store=store)

    async def slow(_: Mapping[int, Position]) -> None:
        saving.set()
        await anyio.sleep(0.05)

    async def work() -> None:
        async with consumer:
            store.before_save = slow
            async for event in consumer:
                if event.json()["n"] == 9:
                    break

    with anyio.fail_after(SAFETY_LIMIT):
        if anyio_backend_name == "asyncio":  # natively: no scope is cancelled
            task = asyncio.create_task(work())
            await saving.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work)
                await saving.wait()
                tasks.cancel_scope.cancel()
    assert len(anyio.get_running_tasks()) == tasks_before
    assert events_of(store.saves[-1][0]) == 5
    assert "it was left" in consumer.health().problems[0].text


async def test_r18_a_cursor_that_cannot_be_stored_parks_its_partition_alone(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(2, page_size=10, checkpoint_every=5)
    fill(publisher, 40, entities=10)

    async def refuses(positions: Mapping[int, Position]) -> None:
        if 0 in positions:
            raise UnicodeEncodeError("ascii", "?", 0, 1, "refused")

    application = Application()
    async with (
        gathering(publisher, 0.01, store=store, on_error="park") as consumer,
        anyio.create_task_group() as tasks,
    ):
        store.before_save = refuses
        tasks.start_soon(run, consumer, application)
        await wait_until(lambda: consumer.status()[0].state == "parked")
        await wait_until(lambda: revisions(store)[1] == 2)
        consumer.stop()
    assert revisions(store)[0] == 1
