"""`Delivery`: the next batch, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import pytest
from feedapi_client.runtime.driver import Driver

from feedapi_client import Batch, FeedClient, Partition, Position, StoreError
from feedapi_client.lineage.planner import Save
from feedapi_client.runtime.delivery import Delivery
from feedapi_client.runtime.fetching import Fetching
from tests.consumer.helpers import RecordingStore
from tests.runtime.helpers import URL, batch, driver_of, listing, safety_limit

pytestmark = pytest.mark.anyio


def delivery_of(driver: Driver) -> Delivery:
    return Delivery(driver, Fetching(driver, FeedClient(URL)))


def receive(driver: Driver, cursor: str) -> None:
    """Let partition 0 have something to deliver."""
    partition = driver.partition(0)
    if not partition.started:
        partition.start("_first")
    partition.received(batch(cursor))
    driver.announce(partition)


async def test_r20_a_failure_while_actions_are_carried_out_is_not_missed() -> None:
    """The iterating task waits for a save of another task, and that task fails."""
    store = RecordingStore()
    driver = driver_of(store)
    delivery = delivery_of(driver)
    saving, go_on = anyio.Event(), anyio.Event()
    failure = StoreError("the other task ended")
    caught: list[StoreError] = []

    async def hold(positions: Mapping[int, Position]) -> None:
        saving.set()
        await go_on.wait()

    async def iterate() -> None:
        with pytest.raises(StoreError) as error:
            await delivery.next()
        caught.append(error.value)

    store.before_save = hold
    with safety_limit():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(driver.apply, [Save({0: Position("a")})])
            await saving.wait()
            tasks.start_soon(iterate)
            await anyio.wait_all_tasks_blocked()
            driver.fail(failure)
            go_on.set()
    assert caught == [failure]


async def test_r20_a_call_that_was_cancelled_loses_no_batch() -> None:
    driver = driver_of(RecordingStore())
    delivery = delivery_of(driver)
    with safety_limit():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(delivery.advance)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        receive(driver, "a")
        found = await delivery.advance()
    assert found is not None
    assert found.cursor == "a"


async def test_r04_one_batch_of_a_partition_is_in_flight_at_a_time() -> None:
    driver = driver_of(RecordingStore())
    delivery = delivery_of(driver)
    receive(driver, "a")
    first = await delivery.next()
    assert isinstance(first, Batch)
    receive(driver, "b")
    assert driver.next_ready() is None
    await delivery.release(0)
    second = await delivery.next()
    assert isinstance(second, Batch)
    assert (first.cursor, second.cursor) == ("a", "b")


async def test_r05_lineage_hears_of_a_commit_when_the_batch_is_released() -> None:
    store = RecordingStore()
    driver = driver_of(store)
    first = driver.planner.entries[0].position
    assert first is not None
    await store.save(driver.settings.key, {0: first})
    delivery = delivery_of(driver)
    receive(driver, "a")
    found = await delivery.next()
    assert found is not None
    await found.commit()
    assert driver.planner.entries[0].cursor == "_first"
    await delivery.release(0)
    assert driver.planner.entries[0].cursor == "a"


async def test_r05_a_batch_that_is_released_during_its_commit_counts_once_that_is_through() -> None:
    store = RecordingStore()
    driver = driver_of(store)
    first = driver.planner.entries[0].position
    assert first is not None
    await store.save(driver.settings.key, {0: first})
    delivery = delivery_of(driver)
    receive(driver, "a")
    found = await delivery.next()
    assert found is not None
    saving, go_on = anyio.Event(), anyio.Event()

    async def hold(positions: Mapping[int, Position]) -> None:
        saving.set()
        await go_on.wait()

    store.before_save = hold
    with safety_limit():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(found.commit)
            await saving.wait()
            await delivery.release(0)
            actions = driver.planner.discover(listing(Partition(1, cursor_from=(0,))))
            assert not [a for a in actions if isinstance(a, Save)], "its position is to change yet"
            store.before_save = None
            go_on.set()
        driver.stop()
        assert await delivery.next() is None
    assert await store.cursors() == {0: "a", 1: "a"}


async def test_a_partition_that_was_read_is_read_on_once_its_batch_is_delivered() -> None:
    driver = driver_of(RecordingStore())
    delivery = delivery_of(driver)
    receive(driver, "a")
    await delivery.next()
    assert driver.scheduler.is_scheduled(driver.partition(0))


async def test_nothing_is_delivered_after_a_stop() -> None:
    driver = driver_of(RecordingStore())
    delivery = delivery_of(driver)
    receive(driver, "a")
    driver.stop()
    assert await delivery.next() is None
