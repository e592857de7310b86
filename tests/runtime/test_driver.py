"""`Driver`: the planner's actions are carried out in order, by any of its callers (R20)."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import anyio.lowlevel
import pytest

from feedapi_client import (
    FencedError,
    LineageError,
    Partition,
    PartitionState,
    PartitionStatus,
    Position,
    Share,
    StoreError,
)
from feedapi_client.lineage.planner import Fail, Rediscover, Report, Save, Start, Stop
from feedapi_client.runtime.board import partition_status
from feedapi_client.runtime.driver import Driver
from feedapi_client.runtime.partition import RuntimePartition
from feedapi_client.sharing.coordinator import Coordinator
from tests.consumer.helpers import RecordingStore
from tests.positions import counted
from tests.runtime.helpers import batch, driver_of, listing, safety_limit

pytestmark = pytest.mark.anyio


@pytest.fixture
def store() -> RecordingStore:
    return RecordingStore()


class Gate:
    """Holds saves back until it is opened."""

    def __init__(self) -> None:
        self.reached = anyio.Event()
        self.open = anyio.Event()

    async def __call__(self, positions: Mapping[int, Position]) -> None:
        self.reached.set()
        await self.open.wait()


async def test_actions_are_carried_out_in_their_order(store: RecordingStore) -> None:
    driver = driver_of(store)
    started_at_save: list[bool] = []

    async def note(positions: Mapping[int, Position]) -> None:
        started_at_save.append(driver.partition(0).started)

    store.before_save = note
    save = [Save({0: counted("a", n)}) for n in (1, 2)]
    await driver.apply([save[0], Start(0, "a"), save[1]])
    assert started_at_save == [False, True]
    assert await store.positions() == {0: counted("a", 2)}


def shown(driver: Driver, id: int) -> PartitionStatus:
    entry, own = driver.planner.entries[id], driver.partitions.get(id)
    new = driver.unsaved.get(id, False)
    return partition_status(entry, own, None, unsaved=id in driver.unsaved, new=new)


async def test_status_shows_a_transfer_only_after_its_save(store: RecordingStore) -> None:
    driver, gate = driver_of(store, listing(0)), Gate()
    first = driver.planner.entries[0].position
    assert first is not None
    await driver.positions.save({0: first})
    store.before_save = gate
    async with anyio.create_task_group() as tasks:
        successor = driver.planner.discover(listing(Partition(1, cursor_from=(0,))))
        tasks.start_soon(driver.apply, successor)
        with safety_limit():
            await gate.reached.wait()
        assert shown(driver, 0).state is PartitionState.READING
        assert shown(driver, 0).cursor == first.cursor
        assert shown(driver, 1).cursor is None
        gate.open.set()
    assert shown(driver, 0).state is PartitionState.SUPERSEDED
    assert shown(driver, 1).cursor == first.cursor


async def test_r20_a_save_that_fails_stays_in_the_queue_for_the_next_caller(
    store: RecordingStore,
) -> None:
    driver = driver_of(store)
    restarting = True

    async def fail(positions: Mapping[int, Position]) -> None:
        if restarting:
            raise ConnectionError("the database restarts")

    store.before_save = fail
    with pytest.raises(StoreError, match="ConnectionError"):
        await driver.apply([Save({0: Position("a")}), Start(0, "a")])
    assert driver.applying
    assert not driver.partition(0).started, "what follows a save waits for it"
    restarting = False
    await driver.apply()
    assert not driver.applying
    assert driver.partition(0).started
    assert await store.cursors() == {0: "a"}


async def test_r20_an_action_whose_caller_was_cancelled_is_carried_out_by_the_next(
    store: RecordingStore,
) -> None:
    driver = driver_of(store)
    gate = Gate()
    store.before_save = gate
    with safety_limit():
        async with anyio.create_task_group() as saving:
            saving.start_soon(driver.apply, [Save({0: Position("a")})])
            await gate.reached.wait()
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(driver.apply, [Start(0, "a")])
                await anyio.wait_all_tasks_blocked()
                waiting.cancel_scope.cancel()
            assert driver.applying
            gate.open.set()
        await driver.apply()
    assert driver.partition(0).started


async def test_r20_a_save_is_finished_before_its_cancellation_and_the_rest_is_left(
    store: RecordingStore,
) -> None:
    driver = driver_of(store)
    gate = Gate()
    store.before_save = gate
    with safety_limit():
        async with anyio.create_task_group() as tasks:
            save = [Save({partition: Position("a")}) for partition in (0, 1)]
            tasks.start_soon(driver.apply, [*save, Start(0, "a")])
            await gate.reached.wait()
            tasks.cancel_scope.cancel()
            gate.open.set()
    assert 0 in await store.cursors()
    await driver.apply()
    assert await store.cursors() == {0: "a", 1: "a"}
    assert driver.partition(0).started


async def test_r17_a_fenced_save_is_never_skipped(store: RecordingStore) -> None:
    driver = driver_of(store)
    await store.save(driver.settings.key, {0: Position("other")})
    with pytest.raises(FencedError):
        await driver.apply([Save({0: Position("a")}), Start(0, "a")])
    with pytest.raises(FencedError):
        await driver.apply()
    assert not driver.partition(0).started


async def test_callers_take_turns(store: RecordingStore) -> None:
    driver = driver_of(store)
    under_way, most = 0, 0

    async def count(positions: Mapping[int, Position]) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await anyio.lowlevel.checkpoint()
        under_way -= 1

    store.before_save = count
    async with anyio.create_task_group() as tasks:
        for partition in range(5):
            tasks.start_soon(driver.apply, [Save({partition: Position("a")})])
    assert most == 1
    assert len(await store.cursors()) == 5


async def test_a_partition_that_is_started_is_scheduled_and_one_that_is_stopped_is_not(
    store: RecordingStore,
) -> None:
    driver = driver_of(store)
    await driver.apply([Start(0, "a")])
    partition = driver.partition(0)
    assert driver.scheduler.is_scheduled(partition)
    await driver.apply([Stop(0)])
    assert not partition.started
    assert not driver.scheduler.is_scheduled(partition)


async def test_a_partition_that_is_busy_is_not_scheduled_by_a_second_start(
    store: RecordingStore,
) -> None:
    """Once its request is over, or its batches are delivered, it goes on by itself."""
    driver = driver_of(store)
    await driver.apply([Start(0, "a")])
    partition = driver.partition(0)
    driver.scheduler.forget(partition)
    scope = anyio.CancelScope()
    partition.begin_request(scope)
    await driver.apply([Start(0, "a")])
    assert not driver.scheduler.is_scheduled(partition)
    partition.end_request(scope)
    partition.received(batch("b"))
    await driver.apply([Start(0, "a")])
    assert not driver.scheduler.is_scheduled(partition)


async def test_a_rediscovery_is_wanted_and_a_report_is_shown(store: RecordingStore) -> None:
    driver = driver_of(store)
    await driver.apply([Rediscover(), Report(0, "is odd"), Report(None, "so is the feed")])
    assert driver.timer.wanted
    assert list(driver.reports) == [
        f"feed {driver.feed}, partition 0: is odd",
        f"feed {driver.feed}: so is the feed",
    ]


async def test_r18_an_error_of_a_partition_ends_the_iteration_or_parks_it(
    store: RecordingStore,
) -> None:
    error = LineageError("it makes no sense", partition=0)
    raising = driver_of(store)
    await raising.apply([Fail(0, error)])
    assert raising.failure is error
    parking = driver_of(store, on_error="park")
    await parking.apply([Fail(0, error)])
    assert parking.failure is None
    assert "parked" in parking.reports[0]
    assert parking.partition(0).error is error


async def test_the_first_failure_is_the_one_that_is_raised(store: RecordingStore) -> None:
    driver = driver_of(store)
    first, second = StoreError("first"), StoreError("second")
    driver.fail(first)
    driver.fail(second)
    assert driver.failure is first


async def test_partitions_are_taken_in_the_order_in_which_they_had_something_to_deliver(
    store: RecordingStore,
) -> None:
    driver = driver_of(store, listing(0, 1, 2))
    for id in (2, 0, 1):
        partition = driver.partition(id)
        partition.start("a")
        partition.received(batch("b"))
        driver.announce(partition)
        driver.announce(partition)  # does not queue it twice
    taken = []
    while (partition := driver.next_ready()) is not None:  # type: ignore[assignment]
        taken.append(partition.id)
    assert taken == [2, 0, 1]


async def test_r09_a_partition_that_the_planner_stopped_delivers_nothing_more(
    store: RecordingStore,
) -> None:
    """The action that stops it may still wait for the save of another one."""
    driver = driver_of(store, on_error="park")
    partition = driver.partition(0)
    partition.start("a")
    partition.received(batch("b"))
    driver.announce(partition)
    driver.planner.fail(0, LineageError("it makes no sense", partition=0))
    assert driver.next_ready() is None


# ---------------------------------------------------------------------- what is read is stored


async def test_r17_a_partition_whose_end_was_refused_is_read_from_what_is_stored(
    store: RecordingStore,
) -> None:
    driver = await shared_driver(store, {0: Position("m", "open", 2)})
    partition = driver.partition(0)
    partition.received(batch("z"))
    deliver(driver, partition, Position("z", "open", 3))  # a save that the store has lost since
    await driver.apply(driver.planner.discover(listing(Partition(0, True, "z"))))
    assert not partition.started
    stored = {0: Position("m", "open", 2)}
    await driver.apply(driver.planner.refresh(stored, owned=[0]))
    assert partition.started
    assert partition.read_cursor == "m"
    assert not driver.reports, "it is no defect of this library"


async def test_r17_a_partition_never_begins_elsewhere_than_at_its_stored_position(
    store: RecordingStore,
) -> None:
    """The invariant of each start: a defect anywhere else costs a report, and no event."""
    driver = await shared_driver(store, {0: Position("m", "open", 2)})
    partition = driver.partition(0)
    partition.received(batch("z"))
    deliver(driver, partition, Position("z", "open", 3))
    await driver.apply([Stop(0)])
    driver.planner.entries[0].position = Position("m", "open", 2)
    await driver.apply([Start(0, "m")])
    assert partition.read_cursor == "m"
    assert "was to be read on from" in driver.reports[-1]


async def test_r17_a_partition_with_a_batch_in_flight_goes_on_behind_it(
    store: RecordingStore,
) -> None:
    driver = await shared_driver(store, {0: Position("m", "open", 2)})
    partition = driver.partition(0)
    partition.received(batch("z"))
    driver.announce(partition)
    partition.take(1)
    driver.planner.delivered(0)
    await driver.apply([Stop(0), Start(0, "m")])
    assert partition.read_cursor == "z"
    assert not driver.reports


async def shared_driver(store: RecordingStore, stored: dict[int, Position]) -> Driver:
    """A driver of an instance that reads partition 0."""
    driver = driver_of(store, shared=True)
    key = driver.settings.key
    driver.sharing = Coordinator(Share(lease_seconds=3600), store, key, driver, name="one")
    driver.planner.entries.clear()
    driver.planner.load(stored)
    await store.replace(driver.settings.key, stored)
    driver.planner.discover(listing(0))
    await driver.apply(driver.planner.refresh(stored, owned=[0]))
    return driver


def deliver(driver: Driver, partition: RuntimePartition, position: Position) -> None:
    """Deliver what is pending, commit and release it."""
    driver.announce(partition)
    partition.take(1)
    driver.planner.delivered(partition.id)
    partition.saved(partition.batches, position, durable=True)
    partition.release()
    driver.planner.released(partition.id, partition.acknowledge())
