"""`run_by_key(event_id=...)`: exactly once by key, across crashes, splits and lost leases."""

from __future__ import annotations

import logging
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from feedapi_client import (
    AlreadyDoneError,
    CommitOrderError,
    Event,
    FeedConsumer,
    FeedError,
    FeedKey,
    FencedError,
    LeaseLostError,
    MemoryCursorStore,
    Quarantine,
    RedisCursorStore,
    Retry,
    Share,
    SQLiteCursorStore,
    StoreError,
)
from feedapi_client.notifications import EventsPassedOver, Notification
from feedapi_client.quarantine import operations
from feedapi_client.quarantine.quarantine_store import quarantine_beside
from feedapi_client.stores.done import DONE_FORMAT, DoneEvent, stored_id
from feedapi_client.telemetry import observe
from feedapi_client.testing import Publisher
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    assert_each_entity_in_order_and_once,
    consume,
    fill,
    rediscovered,
    wait_until,
)

pytestmark = pytest.mark.anyio


def entity(event: Event) -> str:
    return str(event.json()["entity"])


def number(event: Event) -> int:
    return int(event.json()["n"])


class Ledger:
    """An application whose effects are in the file of the cursors, one row an event."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.running: set[int] = set()
        self.calls: list[int] = []
        self.blocked: dict[str, anyio.Event] = {}
        with self.transaction() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS effects (entity TEXT, n INTEGER)")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=SAFETY_LIMIT)) as connection, connection:
            connection.execute("PRAGMA journal_mode=WAL")
            yield connection

    async def __call__(self, event: Event) -> None:
        n = number(event)
        self.calls.append(n)
        self.running.add(n)
        try:
            if entity(event) in self.blocked:
                await self.blocked[entity(event)].wait()
            await self.apply(event)
        finally:
            self.running.discard(n)

    async def apply(self, event: Event) -> None:
        with self.transaction() as connection:
            connection.execute("INSERT INTO effects VALUES (?, ?)", (entity(event), number(event)))
            await event.done(transaction=connection)

    @property
    def effects(self) -> list[dict[str, Any]]:
        with self.transaction() as connection:
            rows = connection.execute("SELECT entity, n FROM effects ORDER BY rowid")
            return [{"entity": row[0], "n": row[1]} for row in rows]

    @property
    def remembered(self) -> int:
        with self.transaction() as connection:
            rows = "SELECT COUNT(*) FROM feedapi_cursors_done WHERE event_id <> ''"
            return int(connection.execute(rows).fetchone()[0])


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "app.db")


def opened(publisher: Publisher, ledger: Ledger, **options: Any) -> FeedConsumer:
    return consume(publisher, store=SQLiteCursorStore(ledger.path), **options)


async def drain(consumer: FeedConsumer, handle: Any, **options: Any) -> None:
    with anyio.fail_after(SAFETY_LIMIT):
        await consumer.run_by_key(handle, **{"key": entity, "event_id": number, **options})


async def finish(publisher: Publisher, ledger: Ledger, handle: Any = None, **options: Any) -> None:
    async with opened(publisher, ledger, follow=False) as consumer:
        await drain(consumer, handle or ledger, **options)


async def crash(publisher: Publisher, ledger: Ledger, *, key: str = "e0") -> None:
    """End while an event of one key hangs and all others are done."""
    waiting = [p for p in publisher.payloads() if p["entity"] != key]
    ledger.blocked[key] = anyio.Event()
    async with opened(publisher, ledger) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(drain, consumer, ledger)
        await wait_until(lambda: len(ledger.effects) == len(waiting))
        tasks.cancel_scope.cancel()
    ledger.blocked.clear()
    ledger.calls.clear()


async def test_r05_a_stop_repeats_nothing_of_what_is_done(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 60, entities=12)

    async def stops(event: Event) -> None:
        await ledger(event)
        if number(event) % 20 == 13:
            consumer.stop()

    for _ in range(3):
        async with opened(publisher, ledger) as consumer:
            await drain(consumer, stops, max_concurrency=4)
    assert len(ledger.calls) < 60
    await finish(publisher, ledger)
    assert len(ledger.calls) == 60
    assert_each_entity_in_order_and_once(ledger.effects, publisher)
    assert ledger.remembered == 0


async def test_a_stop_saves_the_cursor_as_far_as_all_before_it_is_done(
    publisher: Publisher, ledger: Ledger
) -> None:
    """Also of a handler that remembers nothing; and what is passed is forgotten, nothing else."""
    publisher.page_size, publisher.checkpoint_every = 100, 1
    fill(publisher, 60, entities=60)

    async def stops(event: Event) -> None:
        if number(event) == 20 and number(event) not in ledger.calls:
            ledger.calls.append(20)
            raise RuntimeError("once")
        if number(event) < 10:
            ledger.calls.append(number(event))
        else:
            await ledger(event)
        if number(event) == 30:
            consumer.stop()

    async with opened(publisher, ledger) as consumer:
        policy = Retry(base_delay=1000, max_delay=1000)
        await drain(consumer, stops, max_concurrency=1, on_failure=policy)
    assert ledger.calls == list(range(31))
    assert 10 <= ledger.remembered < 20
    await finish(publisher, ledger)
    assert ledger.calls[31:] == [20, *range(31, 60)]
    assert ledger.remembered == 0


async def test_r05_identity_counts_and_not_the_place_in_a_page(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 60, entities=4)
    for page_size, checkpoint_every in ((7, 3), (60, 60), (4, 2)):
        await crash(publisher, ledger)
        publisher.page_size, publisher.checkpoint_every = page_size, checkpoint_every
    await finish(publisher, ledger)
    assert_each_entity_in_order_and_once(ledger.effects, publisher)
    assert ledger.remembered == 0


async def test_what_is_done_is_forgotten_with_the_cursor_that_passes_it(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 100, entities=50)
    gate = ledger.blocked["e42"] = anyio.Event()
    consumer = opened(publisher, ledger, limit={"max_batch_events": 5})
    async with consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(drain, consumer, ledger)
        # e42 is in the ninth batch: what is before it is forgotten, and it keeps the rest.
        await wait_until(lambda: len(ledger.effects) == 98 and ledger.remembered == 58)
        gate.set()
        await wait_until(lambda: len(ledger.effects) == 100 and ledger.remembered == 0)
        consumer.stop()
    assert_each_entity_in_order_and_once(ledger.effects, publisher)


@pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
async def test_r09_successors_know_what_is_done_in_their_ancestors(
    publisher: Publisher, ledger: Ledger, method: Any
) -> None:
    fill(publisher, 40, entities=8)
    await crash(publisher, ledger)
    for partition in publisher.split(0, method=method):
        if method == "cursor-from":
            publisher.split(partition, method=method)  # and its position stays the ancestor's
            break
    fill(publisher, 40, entities=8, start=40)
    await finish(publisher, ledger)
    assert sorted(ledger.calls) == sorted({*range(0, 40, 8), *range(40, 80)})
    assert_each_entity_in_order_and_once(ledger.effects, publisher)
    assert ledger.remembered == 0


async def test_r05_a_transaction_that_rolls_back_is_not_done(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 20, entities=4)
    failed: set[int] = set()

    async def fails_behind_done(event: Event) -> None:
        with ledger.transaction() as connection:
            connection.execute("INSERT INTO effects VALUES (?, ?)", (entity(event), number(event)))
            await event.done(transaction=connection)
            if number(event) not in failed:
                failed.add(number(event))
                raise RuntimeError("at the last moment")

    await finish(publisher, ledger, fails_behind_done, on_failure=Retry(base_delay=0.001))
    assert failed == set(range(20))
    assert_each_entity_in_order_and_once(ledger.effects, publisher)


@pytest.mark.parametrize("on_failure", ["raise", Retry(base_delay=0.001), "quarantine"])
async def test_r05_a_failure_behind_the_commit_repeats_nothing(
    publisher: Publisher, ledger: Ledger, on_failure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fill(publisher, 20, entities=4)

    async def fails_behind_the_commit(event: Event) -> None:
        await ledger(event)
        raise RuntimeError(f"secret {number(event)}")

    with caplog.at_level(logging.WARNING):
        await finish(publisher, ledger, fails_behind_the_commit, on_failure=on_failure)
    assert_each_entity_in_order_and_once(ledger.effects, publisher)
    assert caplog.text.count("the event is done, although its handler failed") == 20
    async with SQLiteCursorStore(ledger.path) as store:
        kept = quarantine_beside(store)
        await kept.prepare()
        assert [each async for each in operations.list_events(kept)] == []


async def test_done_twice_in_one_transaction_is_an_error_that_rolls_back(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 1)
    raised: list[Exception] = []

    async def twice(event: Event) -> None:
        with ledger.transaction() as connection:
            connection.execute("INSERT INTO effects VALUES (?, ?)", (entity(event), number(event)))
            await event.done(transaction=connection)
            try:
                await event.done(transaction=connection)
            except AlreadyDoneError as error:
                raised.append(error)
                raise

    with pytest.raises(AlreadyDoneError):
        await finish(publisher, ledger, twice)
    assert ledger.effects == []
    await finish(publisher, ledger)
    assert_each_entity_in_order_and_once(ledger.effects, publisher)
    assert len(raised) == 1


async def test_done_again_behind_a_commit_is_refused_and_counts_once(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 5)

    async def twice(event: Event) -> None:
        for _ in range(2):
            await ledger.apply(event)

    await finish(publisher, ledger, twice)
    assert_each_entity_in_order_and_once(ledger.effects, publisher)


async def test_a_handler_may_begin_another_transaction_behind_a_rollback(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 5)

    async def tries_again(event: Event) -> None:
        try:
            with ledger.transaction() as connection:
                await event.done(transaction=connection)
                raise RuntimeError("a deadlock, say")
        except RuntimeError:
            await ledger(event)

    await finish(publisher, ledger, tries_again)
    assert_each_entity_in_order_and_once(ledger.effects, publisher)


async def test_an_event_that_is_not_done_by_its_handler_counts_as_handled(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 10)
    seen: list[int] = []

    async def ignores(event: Event) -> None:
        seen.append(number(event))

    await finish(publisher, ledger, ignores)
    await finish(publisher, ledger, ignores)
    assert sorted(seen) == list(range(10))


async def test_without_a_transaction_it_is_remembered_at_once(publisher: Publisher) -> None:
    fill(publisher, 40, entities=4)
    store = MemoryCursorStore()
    seen: list[int] = []
    gate = anyio.Event()

    async def handle(event: Event) -> None:
        if entity(event) == "e0":
            await gate.wait()
        seen.append(number(event))
        await event.done()

    async with consume(publisher, store=store) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(drain, consumer, handle)
        await wait_until(lambda: len(seen) == 30)
        tasks.cancel_scope.cancel()
    gate.set()
    async with consume(publisher, store=store, follow=False) as consumer:
        await drain(consumer, handle)
    assert sorted(seen) == list(range(40))


class Told:
    """What is passed over, in notification, metric and status."""

    def __init__(self) -> None:
        self.notified = self.counted = self.shown = 0

    @contextmanager
    def of(self, consumer: FeedConsumer) -> Iterator[None]:
        meters = InMemoryMetricReader()
        meter = MeterProvider([meters]).get_meter("test")
        with consumer.subscribe(self.listen), observe(consumer, meter=meter):
            yield
            self.shown = sum(p.passed_over for p in consumer.status().partitions.values())
            found = meters.get_metrics_data()
            assert found is not None
            for metric in orjson.loads(found.to_json())["resource_metrics"][0]["scope_metrics"][0][
                "metrics"
            ]:
                if metric["name"] == "feedapi.consumer.passed_over":
                    self.counted = sum(point["value"] for point in metric["data"]["data_points"])

    def listen(self, notification: Notification) -> None:
        if isinstance(notification, EventsPassedOver):
            self.notified += notification.events


async def test_equal_events_in_flight_are_handled_once_and_counted(
    publisher: Publisher, ledger: Ledger
) -> None:
    for _ in range(2):
        fill(publisher, 10, entities=4)
    told = Told()
    async with opened(publisher, ledger, follow=False) as consumer:
        with told.of(consumer):
            await drain(consumer, ledger)
    assert sorted(effect["n"] for effect in ledger.effects) == list(range(10))
    assert (told.notified, told.counted, told.shown) == (10, 10, 10)


async def test_what_is_passed_over_after_a_crash_is_counted(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 40, entities=4)
    await crash(publisher, ledger)
    told = Told()
    async with opened(publisher, ledger, follow=False) as consumer:
        with told.of(consumer):
            await drain(consumer, ledger)
    assert (told.notified, told.counted, told.shown) == (30, 30, 30)


def per_entity(event: Event) -> int:
    return number(event) // 4


async def test_an_id_that_another_event_has_is_an_error(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 40, entities=4)
    with pytest.raises(FeedError, match="two events with one event_id have different payloads"):
        await finish(publisher, ledger, event_id=per_entity)


async def test_an_event_with_the_id_of_another_is_put_aside_and_lost_by_no_crash(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 40, entities=4)
    ledger.blocked["e0"] = anyio.Event()
    async with opened(publisher, ledger) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(
            lambda: drain(consumer, ledger, event_id=per_entity, on_failure="quarantine")
        )
        await wait_until(lambda: ledger.running == {0})
        tasks.cancel_scope.cancel()
    ledger.blocked.clear()
    await finish(publisher, ledger, event_id=per_entity, on_failure="quarantine")
    async with SQLiteCursorStore(ledger.path) as store:
        kept = quarantine_beside(store)
        await kept.prepare()
        aside = [orjson.loads(each.raw)["n"] async for each in operations.list_events(kept)]
    assert sorted(aside + [effect["n"] for effect in ledger.effects]) == list(range(40))


@pytest.mark.parametrize("wrong", [None, True, 1.5, "", b"", ["a"]])
async def test_an_event_without_an_identity_fails_by_itself(
    publisher: Publisher, ledger: Ledger, wrong: object
) -> None:
    fill(publisher, 20, entities=4)

    def event_id(event: Event) -> object:
        return wrong if number(event) == 7 else number(event)

    with pytest.raises((TypeError, ValueError)):
        await finish(publisher, ledger, event_id=event_id)
    await finish(publisher, ledger, event_id=event_id, on_failure="quarantine")
    assert sorted(effect["n"] for effect in ledger.effects) == [n for n in range(20) if n != 7]
    assert 7 not in ledger.calls


def test_an_identity_is_stored_as_a_digest() -> None:
    id = uuid.UUID(int=5)
    values = ("5", b"5", 5, id, "\ud800", "x" * 100_000, -5, 10**40)
    stored = {stored_id(value) for value in values}
    assert len(stored) == len(values)
    assert all(each.startswith(DONE_FORMAT) and len(each) <= 64 for each in stored)
    # What 1.0.0 writes: every later version has to find it.
    assert stored_id("event-1") == GOLDEN_TEXT
    assert stored_id(5) == GOLDEN_NUMBER


GOLDEN_TEXT = "1:c7cdf4bbbbdc5dc0d1a70905c6aeffb59d6df6dd"
GOLDEN_NUMBER = "1:1a9ea7b940bc7e7dce3ee64030ee17d2b437e87a"


async def test_what_a_newer_version_has_done_is_not_taken_for_nothing(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 8, entities=4)
    await crash(publisher, ledger)
    with ledger.transaction() as connection:
        connection.execute(
            "UPDATE feedapi_cursors_done SET event_id = '2:' || substr(event_id, 3) "
            "WHERE event_id <> ''"
        )
    with pytest.raises(StoreError, match="newer version"):
        await finish(publisher, ledger)
    assert ledger.calls == []


async def test_done_is_for_handlers_with_event_id(publisher: Publisher, ledger: Ledger) -> None:
    fill(publisher, 5)
    kept: list[Event] = []

    async def keeps(event: Event) -> None:
        kept.append(event)
        with pytest.raises(CommitOrderError, match="event_id"):
            await event.done()

    async with opened(publisher, ledger, follow=False) as consumer:
        await consumer.run_by_key(keeps, key=entity)
    fill(publisher, 5, start=5)

    async def handles(event: Event) -> None:
        kept.append(event)
        await ledger(event)

    await finish(publisher, ledger, handles)
    assert len(kept) == 10
    for event in kept:
        with pytest.raises(CommitOrderError, match="while it handles"):
            await event.done()


@pytest.mark.parametrize("event_id", ["id", 5, anyio.sleep])
async def test_what_is_no_function_is_refused_before_anything_is_read(
    publisher: Publisher, ledger: Ledger, event_id: Any
) -> None:
    async with opened(publisher, ledger, follow=False) as consumer:
        with pytest.raises(TypeError, match="event_id"):
            await consumer.run_by_key(ledger, key=entity, event_id=event_id)
    assert publisher.counters["fetch"] == 0


async def test_a_store_that_can_not_remember_is_refused_before_anything_is_read(
    publisher: Publisher, ledger: Ledger
) -> None:
    class Plain:
        async def load(self, feed: FeedKey) -> dict[int, Any]:
            return {}

        async def save(self, feed: FeedKey, positions: Any, *, transaction: Any = None) -> None:
            pass

    redis = RedisCursorStore("redis://127.0.0.1:1")
    for store in (Plain(), redis):
        consumer = consume(publisher, store=store)
        with pytest.raises(TypeError, match=r"remembers what is done \(event_id\)"):
            await consumer.run_by_key(ledger, key=entity, event_id=number)
    assert publisher.counters["fetch"] == 0


async def test_r17_a_second_consumer_takes_over_and_the_first_one_does_nothing_more(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 40, entities=4)
    gates = {f"e{n}": anyio.Event() for n in range(4)}
    first, second = Ledger(ledger.path), Ledger(ledger.path)
    first.blocked.update(gates)
    ended: list[BaseException] = []

    async def run_first() -> None:
        async with opened(publisher, ledger) as consumer:
            try:
                await drain(consumer, first)
            except FencedError as error:
                ended.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_first)
        await wait_until(lambda: len(first.running) == 4)
        gates["e0"].set()
        await wait_until(lambda: len(ledger.effects) == 10)
        await finish(publisher, second)
        for gate in gates.values():
            gate.set()
    assert [type(error) for error in ended] == [FencedError]
    assert_each_entity_in_order_and_once(ledger.effects, publisher)


async def test_r17_a_lost_lease_refuses_what_its_handlers_still_do(
    serve: Callable[..., Publisher], ledger: Ledger
) -> None:
    """The new owner has passed the event, and forgotten it, when the old one wants to do it."""
    publisher = serve(1, page_size=10, checkpoint_every=5)
    fill(publisher, 40, entities=4)
    share = Share(lease_seconds=60, rebalance_seconds=0.05, handover_seconds=60)
    refused: list[Exception] = []
    gate = anyio.Event()

    async def late(event: Event) -> None:
        if number(event) < 4:
            await gate.wait()
        try:
            await ledger.apply(event)
        except LeaseLostError as error:
            refused.append(error)
            raise

    first = opened(publisher, ledger, share=share)
    async with first, anyio.create_task_group() as tasks:
        tasks.start_soon(drain, first, late)
        await wait_until(lambda: first.status().events == 40)
        # Somebody whom the lease was not lost to, as after a partition of the network.
        async with opened(publisher, ledger, follow=False) as second:
            await drain(second, ledger)
        assert_each_entity_in_order_and_once(ledger.effects, publisher)
        assert ledger.remembered == 0
        gate.set()
        await wait_until(lambda: len(refused) == 4)
        fill(publisher, 10, entities=4, start=40)
        await wait_until(lambda: len(ledger.effects) == 50 and not ledger.remembered)
        first.stop()
    assert_each_entity_in_order_and_once(ledger.effects, publisher)


async def test_a_claim_that_waits_keeps_no_other_partition_waiting(
    serve: Callable[..., Publisher], ledger: Ledger
) -> None:
    publisher = serve(2, page_size=10, checkpoint_every=5)
    fill(publisher, 40, entities=8)
    store = MemoryCursorStore()
    gate, seen = anyio.Event(), set[int]()
    take_over = store.take_over

    async def slow(feed: Any, partitions: Any, revision: int) -> Any:
        if partitions[0] == 0:
            await gate.wait()
        return await take_over(feed, partitions, revision)

    store.take_over = slow  # type: ignore[method-assign]

    async def handle(event: Event) -> None:
        seen.add(event.partition)
        await event.done()

    consumer = consume(publisher, store=store, follow=False)
    async with consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(drain, consumer, handle)
        await wait_until(lambda: seen == {1})
        await rediscovered(publisher)
        assert seen == {1}
        gate.set()
    assert seen == {0, 1}


async def test_a_failing_claim_is_retried_or_ends_the_iteration(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 10)
    store = SQLiteCursorStore(ledger.path)
    take_over, failures = store.take_over, [1, 2, 3]

    async def broken(feed: Any, partitions: Any, revision: int) -> Any:
        if failures:
            failures.pop()
            raise OSError("the server is away")
        return await take_over(feed, partitions, revision)

    store.take_over = broken  # type: ignore[method-assign]
    async with consume(publisher, store=store, follow=False) as consumer:
        with pytest.raises(StoreError, match="claiming a partition failed: OSError"):
            await drain(consumer, ledger)
        await drain(consumer, ledger, on_failure=Retry(base_delay=0.001))
    assert_each_entity_in_order_and_once(ledger.effects, publisher)


async def test_a_failing_event_and_its_key_go_into_quarantine(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 40, entities=4)

    async def poison(event: Event) -> None:
        if number(event) == 5:
            raise RuntimeError("poison")
        await ledger(event)

    policy = Quarantine(whole_key=True)
    await finish(publisher, ledger, poison, on_failure=policy)
    done = [n for n in range(40) if n % 4 != 1 or n < 5]
    assert sorted(effect["n"] for effect in ledger.effects) == done
    assert ledger.remembered == 0


def test_the_payload_of_an_event_is_nowhere_in_what_is_stored(ledger: Ledger) -> None:
    event = DoneEvent(0, 1, stored_id("customer-4711"))
    assert b"4711" not in orjson.dumps(list(event))


async def test_r09_a_partition_that_is_superseded_while_it_is_claimed_is_given_up(
    publisher: Publisher, ledger: Ledger
) -> None:
    fill(publisher, 10)
    store = SQLiteCursorStore(ledger.path)
    take_over, began, gate = store.take_over, anyio.Event(), anyio.Event()

    async def slow(feed: Any, partitions: Any, revision: int) -> Any:
        if partitions[0] == 0:
            began.set()
            await gate.wait()
        return await take_over(feed, partitions, revision)

    store.take_over = slow  # type: ignore[method-assign]
    async with consume(publisher, store=store) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(drain, consumer, ledger)
        await began.wait()
        publisher.split(0, method="cursor-from")
        await wait_until(lambda: consumer.status()[0].state.value == "superseded")
        await wait_until(lambda: len(ledger.effects) == 10)
        gate.set()
        fill(publisher, 10, start=10)
        await wait_until(lambda: len(ledger.effects) == 20)
        consumer.stop()
    assert_each_entity_in_order_and_once(ledger.effects, publisher)
