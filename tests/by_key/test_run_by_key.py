"""`FeedConsumer.run_by_key`: each key in order, keys at once, cursors behind what is done."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import orjson
import pytest

from feedapi_client import Event, FeedConsumer, PartitionState, Quarantine, Retry, StoreError
from feedapi_client.model import FeedKey
from feedapi_client.quarantine import operations, quarantine_beside
from feedapi_client.quarantine.quarantine_store import MemoryQuarantineStore
from feedapi_client.status import ProblemName
from feedapi_client.testing import Publisher
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    RecordingStore,
    assert_each_entity_in_order_and_once,
    consume,
    fill,
    rediscovered,
    wait_until,
)

pytestmark = pytest.mark.anyio


def entity(event: Event) -> str:
    return str(event.json()["entity"])


class Application:
    """Handles events, notes their order, and fails a test where two of one key overlap."""

    def __init__(self) -> None:
        self.payloads: list[Any] = []
        self.running: set[str] = set()
        self.most = 0
        self.blocked: dict[str, anyio.Event] = {}

    async def __call__(self, event: Event) -> None:
        payload = event.json()
        key = payload["entity"]
        assert key not in self.running, f"two events of {key} at once"
        self.running.add(key)
        self.most = max(self.most, len(self.running))
        try:
            if key in self.blocked:
                await self.blocked[key].wait()
            else:
                await anyio.lowlevel.checkpoint()
        finally:
            self.running.discard(key)
        self.payloads.append(payload)

    def of(self, key: str) -> list[int]:
        return [payload["n"] for payload in self.payloads if payload["entity"] == key]


async def drain(consumer: FeedConsumer, handle: Any, **options: Any) -> None:
    with anyio.fail_after(SAFETY_LIMIT):
        await consumer.run_by_key(handle, key=entity, **options)


async def test_r04_each_key_is_handled_in_order_and_keys_at_once(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 200, entities=7)
    application = Application()
    async with consume(publisher, follow=False, store=store) as consumer:
        await drain(consumer, application)
    assert_each_entity_in_order_and_once(application.payloads, publisher)
    assert application.most == 7
    async with consume(publisher, follow=False, store=store) as consumer:
        await drain(consumer, application)
    assert len(application.payloads) == 200


async def test_the_bound_of_handlers_is_kept(publisher: Publisher) -> None:
    fill(publisher, 100, entities=50)
    application = Application()
    async with consume(publisher, follow=False) as consumer:
        await drain(consumer, application, max_concurrency=3)
    assert application.most == 3


@pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
async def test_r04_the_order_of_a_key_holds_across_splits(
    serve: Callable[..., Publisher], store: RecordingStore, method: Any
) -> None:
    publisher = serve(page_size=7, checkpoint_every=3)
    fill(publisher, 50)
    application = Application()
    application.blocked["e0"] = anyio.Event()
    async with consume(publisher, store=store) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(drain, consumer, application)
        await wait_until(lambda: len(application.payloads) == 40)
        children = publisher.split(0, method=method)
        fill(publisher, 50, start=50)
        await wait_until(lambda: set(children) <= set(consumer.status().partitions))
        await rediscovered(publisher)
        for p in children:
            assert consumer.status()[p].state is PartitionState.WAITING
            assert consumer.status()[p].events == 0
        application.blocked.pop("e0").set()
        await wait_until(lambda: len(application.payloads) >= 100)
        consumer.stop()
    assert_each_entity_in_order_and_once(application.payloads, publisher)


async def test_r05_the_cursor_never_passes_an_unfinished_event(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 40, entities=4)
    application = Application()
    application.blocked["e2"] = anyio.Event()
    async with (
        consume(publisher, store=store, limit={"max_batch_events": 5}) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(drain, consumer, application)
        await wait_until(lambda: len(application.payloads) == 30)
        await wait_until(lambda: consumer.status()[0].events == 40)
        assert len(store.saves) <= 1  # the first position of an empty store
        tasks.cancel_scope.cancel()
    again = Application()
    async with consume(publisher, store=store, follow=False) as consumer:
        await drain(consumer, again)
    assert again.of("e2") == application.of("e2") + list(range(2, 40, 4))
    assert_each_entity_in_order_and_once(again.payloads, publisher)


async def test_a_slow_store_gathers_commits(publisher: Publisher, store: RecordingStore) -> None:
    fill(publisher, 100)
    gate = anyio.Event()

    async def before_save(positions: Any) -> None:
        if any(p.replaces is not None for p in positions.values()):
            await gate.wait()

    store.before_save = before_save
    application = Application()
    async with (
        consume(publisher, store=store, follow=False, limit={"max_batch_events": 5}) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(drain, consumer, application)
        await wait_until(lambda: len(application.payloads) == 100)
        gate.set()
    assert len(store.saves) <= 4
    assert await store.cursors() == {0: publisher.end_cursor(0)}


# ---------------------------------------------------------------------- bounds


@pytest.mark.parametrize("bound", ["events", "bytes"])
async def test_r16_memory_is_bounded_behind_one_event_that_hangs(
    publisher: Publisher, bound: str
) -> None:
    """What Parallel Consumer's users see: memory grows behind one slow event."""
    fill(publisher, 1000, entities=10)
    application = Application()
    application.blocked["e3"] = anyio.Event()
    limit: dict[str, Any] = {"max_batch_events": 5, "max_batch_bytes": 1000}
    options: dict[str, Any] = {}
    if bound == "events":
        options["max_in_flight"] = 60
    else:
        limit["max_buffered_bytes"] = 40_000
    async with consume(publisher, limit=limit) as consumer, anyio.create_task_group() as tasks:

        async def run() -> None:
            await drain(consumer, application, **options)

        tasks.start_soon(run)
        await wait_until(lambda: application.running == {"e3"} and len(application.payloads) > 20)
        delivered, before = consumer.status()[0].events, -1
        while delivered != before:
            await rediscovered(publisher, 4)
            delivered, before = consumer.status()[0].events, delivered
        assert delivered < 300
        if bound == "events":
            assert delivered <= 60
            assert len(application.payloads) <= 54
        application.blocked.pop("e3").set()
        await wait_until(lambda: len(application.payloads) == 1000)
        consumer.stop()
    assert_each_entity_in_order_and_once(application.payloads, publisher)


async def test_checkpoints_further_apart_than_the_bound_still_come(serve: Any) -> None:
    publisher = serve(page_size=100, checkpoint_every=50)
    fill(publisher, 200)
    application = Application()
    async with consume(publisher, follow=False) as consumer:
        await drain(consumer, application, max_in_flight=7)
    assert_each_entity_in_order_and_once(application.payloads, publisher)


async def test_health_says_what_holds_a_cursor_back_and_never_the_key(
    publisher: Publisher,
) -> None:
    fill(publisher, 40, entities=4)
    application = Application()
    application.blocked["e1"] = anyio.Event()
    limit = {"stall_timeout": 0.3, "max_batch_events": 5}
    async with consume(publisher, limit=limit) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(drain, consumer, application)
        await wait_until(lambda: not consumer.health().live)
        await wait_until(lambda: len(application.payloads) == 30)
        problem = next(p for p in consumer.health().problems if p.partition == 0)
        assert problem.name is ProblemName.HANDLER_STUCK
        assert "38 later events" in problem.text
        assert "e1" not in problem.text
        application.blocked.pop("e1").set()
        await wait_until(lambda: consumer.health().live)
        assert consumer.health().problems == ()
        tasks.cancel_scope.cancel()


async def test_a_handler_that_never_waits_lets_others_run(publisher: Publisher) -> None:
    fill(publisher, 3000, entities=3)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    async def busy(event: Event) -> None:
        for _ in range(300):
            event.json()

    async with consume(publisher, follow=False) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(others)
        await drain(consumer, busy)
        tasks.cancel_scope.cancel()
    assert turns > 20


# ---------------------------------------------------------------------- failures


async def test_an_error_of_the_handler_ends_the_iteration_and_loses_nothing(
    publisher: Publisher, store: RecordingStore, caplog: pytest.LogCaptureFixture
) -> None:
    fill(publisher, 50)
    application = Application()

    async def fails(event: Event) -> None:
        if event.json()["n"] == 33:
            raise RuntimeError(f"no such entity: {entity(event)}")
        await application(event)

    with caplog.at_level(logging.ERROR, "feedapi_client"):
        async with consume(publisher, store=store, follow=False) as consumer:
            with pytest.raises(RuntimeError, match="no such entity"):
                await drain(consumer, fails)
            assert not consumer.health().live
    assert "partition 0: the handler failed with RuntimeError" in caplog.text
    assert "e3" not in caplog.text  # which stands in the payload (R19)
    again = Application()
    async with consume(publisher, store=store, follow=False) as consumer:
        await drain(consumer, again)
    seen = {payload["n"] for payload in application.payloads + again.payloads}
    assert seen == set(range(50))
    assert 33 in [payload["n"] for payload in again.payloads]


async def test_a_failing_event_is_retried_while_other_keys_go_on(
    publisher: Publisher, store: RecordingStore
) -> None:
    """A poison event must not hold the lag without a word, nor a place among the handlers."""
    fill(publisher, 100, entities=4)
    application = Application()
    failing = True

    async def handle(event: Event) -> None:
        if failing and entity(event) in ("e0", "e1"):
            raise RuntimeError("the service says no")
        await application(event)

    async with consume(publisher, store=store) as consumer, anyio.create_task_group() as tasks:

        async def run() -> None:
            forever = Retry(attempts=None, base_delay=0.01, max_delay=0.02)
            await drain(consumer, handle, max_concurrency=1, on_failure=forever)

        tasks.start_soon(run)
        await wait_until(lambda: len(application.payloads) == 50)
        await wait_until(lambda: consumer.status()[0].events == 100)
        health = consumer.health()
        assert health.live
        assert [p.name for p in health.problems] == [ProblemName.HANDLER_FAILING]
        assert "99 later events" in health.problems[0].text
        status = consumer.status()[0]
        assert status.state is PartitionState.RETRYING
        assert status.handler_failures > 1
        failing = False
        await wait_until(lambda: len(application.payloads) == 100)
        await wait_until(lambda: consumer.health().problems == ())
        assert consumer.status()[0].error is None
        consumer.stop()
    assert_each_entity_in_order_and_once(application.payloads, publisher)


async def test_retries_end_with_the_error(publisher: Publisher) -> None:
    fill(publisher, 10)
    calls = 0

    async def handle(_: Event) -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError("always")

    policy = Retry(attempts=3, base_delay=0.001, max_delay=0.002)
    async with consume(publisher) as consumer:
        with pytest.raises(RuntimeError, match="always"):
            await drain(consumer, handle, max_concurrency=1, on_failure=policy)
    assert calls >= 3


async def test_a_failing_event_goes_into_quarantine_and_its_key_goes_on(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 50)
    application, quarantine = Application(), MemoryQuarantineStore()

    async def handle(event: Event) -> None:
        if event.json()["n"] in (7, 12, 30):
            raise RuntimeError("poison")
        await application(event)

    async with consume(publisher, store=store, follow=False) as consumer:
        await drain(consumer, handle, on_failure=Quarantine(to=quarantine))
        assert consumer.status()[0].quarantined == 3
    kept = [event async for event in operations.list_events(quarantine)]
    assert sorted(n_of_raw(event.raw) for event in kept) == [7, 12, 30]
    assert application.of("e2") == [2, *range(17, 50, 5)]
    assert await store.cursors() == {0: publisher.end_cursor(0)}


def n_of_raw(raw: bytes) -> int:
    return int(orjson.loads(raw)["n"])


async def test_with_whole_key_later_events_of_a_key_wait_for_the_replay(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 20)
    application, quarantine = Application(), MemoryQuarantineStore()
    failing = {7}

    async def handle(event: Event) -> None:
        if event.json()["n"] in failing:
            raise RuntimeError("poison")
        await application(event)

    policy = Quarantine(to=quarantine, whole_key=True, limit=1)
    async with consume(publisher, store=store, follow=False) as consumer:
        await drain(consumer, handle, on_failure=policy)
    assert application.of("e2") == [2]
    # In another run, too: what is held back is read from the quarantine.
    fill(publisher, 10, start=20)
    failing.clear()
    async with consume(publisher, store=store, follow=False) as consumer:
        await drain(consumer, handle, on_failure=policy)
    assert application.of("e2") == [2]
    kept = [event async for event in operations.list_events(quarantine)]
    assert [n_of_raw(event.raw) for event in kept] == [7, 12, 17, 22, 27]

    async def replayed(batch: Any) -> None:
        for event in batch.events:
            await application(event)

    await operations.replay(quarantine, replayed)
    fill(publisher, 10, start=30)
    async with consume(publisher, store=store, follow=False) as consumer:
        await drain(consumer, handle, on_failure=policy)
    assert_each_entity_in_order_and_once(application.payloads, publisher)


class OwnQuarantine:
    """A quarantine of the application's own, which has the methods of the protocol alone."""

    def __init__(self) -> None:
        kept = MemoryQuarantineStore()
        self.prepare, self.add, self.remove = kept.prepare, kept.add, kept.remove
        self.page, self.get = kept.page, kept.get


@pytest.mark.parametrize("beside", [True, False])
async def test_r07_adopted_cursors_have_their_quarantined_events_with_them(
    publisher: Publisher, store: RecordingStore, beside: bool
) -> None:
    fill(publisher, 20)
    application = Application()
    quarantine = quarantine_beside(store) if beside else MemoryQuarantineStore()
    policy = Quarantine(to=None if beside else quarantine, whole_key=True)

    async def fails(event: Event) -> None:
        if event.json()["n"] == 7:
            raise RuntimeError("poison")
        await application(event)

    async def replayed(batch: Any) -> None:
        await application(batch.events[0])

    async with consume(publisher, store=store, follow=False) as consumer:
        await drain(consumer, fails, on_failure=policy)
    fill(publisher, 10, start=20)
    async with consume(publisher, store=store, feed_name="orders", follow=False) as consumer:
        await drain(consumer, application, on_failure=policy)
        key = consumer.key
    kept = [event async for event in operations.list_events(quarantine, key)]
    assert [n_of_raw(event.raw) for event in kept] == [7, 12, 17, 22, 27]
    await operations.replay(quarantine, replayed, feed=key)
    assert_each_entity_in_order_and_once(application.payloads, publisher)


@pytest.mark.parametrize("by_key", [True, False])
async def test_r07_quarantined_events_that_nobody_can_take_along_refuse_the_start(
    publisher: Publisher, store: RecordingStore, by_key: bool
) -> None:
    fill(publisher, 1)
    policy = Quarantine(to=OwnQuarantine())

    async def handle(_: Any) -> None:
        raise RuntimeError("poison")

    async def run(**options: Any) -> None:
        async with consume(publisher, store=store, follow=False, **options) as consumer:
            if by_key:
                await drain(consumer, handle, on_failure=policy)
            else:
                await consumer.run(handle, on_failure=policy)

    await run()
    with pytest.raises(StoreError, match="replay or drop them"):
        await run(feed_name="orders")


async def test_r07_quarantined_events_stay_with_cursors_that_are_not_adopted(
    publisher: Publisher, store: RecordingStore
) -> None:
    """Both keys are in use: the events are those of the URL's consumer."""
    fill(publisher, 10)
    policy = Quarantine(to=MemoryQuarantineStore())

    async def handle(event: Event) -> None:
        if event.json()["n"] in (2, 7):
            raise RuntimeError("poison")

    async def run(handle: Any, **options: Any) -> FeedKey:
        async with consume(
            publisher, store=store, start="first", follow=False, **options
        ) as consumer:
            await drain(consumer, handle, on_failure=policy)
            return consumer.key

    await run(Application(), feed_name="orders")
    url = await run(handle)
    await run(Application(), feed_name="orders")
    assert policy.to is not None
    kept = [each async for each in operations.list_events(policy.to, url)]
    assert [n_of_raw(event.raw) for event in kept] == [2, 7]


async def test_a_replay_beside_a_running_consumer_lets_the_key_go_on(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 10)
    application, quarantine = Application(), MemoryQuarantineStore()

    async def handle(event: Event) -> None:
        if event.json()["n"] == 2:
            raise RuntimeError("poison")
        await application(event)

    async def replayed(batch: Any) -> None:
        await application(batch.events[0])

    async with consume(publisher, store=store) as consumer, anyio.create_task_group() as tasks:

        async def run() -> None:
            await drain(consumer, handle, on_failure=Quarantine(to=quarantine, whole_key=True))

        tasks.start_soon(run)
        await wait_until(lambda: consumer.status()[0].quarantined == 2)
        await operations.replay(quarantine, replayed)
        fill(publisher, 10, start=10)
        await wait_until(lambda: len(application.payloads) == 20)
        consumer.stop()
    assert_each_entity_in_order_and_once(application.payloads, publisher)


async def test_too_many_events_in_quarantine_in_a_row_are_an_error(publisher: Publisher) -> None:
    fill(publisher, 50)

    async def handle(_: Event) -> None:
        raise RuntimeError("the database is down")

    policy = Quarantine(to=MemoryQuarantineStore(), limit=5)
    async with consume(publisher, follow=False) as consumer:
        with pytest.raises(RuntimeError, match="the database is down") as raised:
            await drain(consumer, handle, on_failure=policy)
    assert "5 events in a row" in raised.value.__notes__[0]


async def test_an_event_without_a_key_is_one_that_fails(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 20)
    publisher.append(0, {"n": 20})
    fill(publisher, 10, start=21)
    application, quarantine = Application(), MemoryQuarantineStore()

    def strict(event: Event) -> str:
        return str(event.json()["entity"])

    async with consume(publisher, store=store) as consumer:
        with pytest.raises(KeyError):
            await consumer.run_by_key(application, key=strict)
    async with consume(publisher, store=store, follow=False) as consumer:
        await consumer.run_by_key(
            application, key=strict, on_failure=Quarantine(to=quarantine, whole_key=True)
        )
    kept = [event async for event in operations.list_events(quarantine)]
    assert [n_of_raw(event.raw) for event in kept] == [20]


async def test_a_save_that_fails_is_raised(publisher: Publisher) -> None:
    fill(publisher, 20)
    async with consume(publisher, store=RecordingStore(), follow=False) as consumer:

        async def before_save(_: Any) -> None:
            raise StoreError("the disk is full")

        consumer.store.before_save = before_save  # type: ignore[attr-defined]
        with pytest.raises(StoreError, match="the disk is full"):
            await drain(consumer, Application())


async def test_with_retry_a_save_that_fails_is_tried_again(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 20)
    failures = 3
    application = Application()

    async def before_save(_: Any) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise StoreError("a moment please")

    async with consume(publisher, store=store, follow=False) as consumer:
        store.before_save = before_save
        policy = Retry(attempts=None, base_delay=0.001, max_delay=0.002)
        await drain(consumer, application, on_failure=policy)
    assert_each_entity_in_order_and_once(application.payloads, publisher)
    assert await store.cursors() == {0: publisher.end_cursor(0)}


# ---------------------------------------------------------------------- the end


async def test_stop_begins_nothing_and_finishes_what_was_begun(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(page_size=100, checkpoint_every=1)
    fill(publisher, 100, entities=50)
    application = Application()
    gate = anyio.Event()
    application.blocked = {f"e{n}": gate for n in range(50)}
    async with consume(publisher, store=store) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: drain(consumer, application, max_concurrency=7))
        await wait_until(lambda: len(application.running) == 7)
        consumer.stop()
        await wait_until(lambda: consumer.health().ready)
        gate.set()
    assert n_of(application) == list(range(7))
    assert not consumer.cut_short
    async with consume(publisher, store=store, follow=False) as consumer:
        await drain(consumer, application)
    seen = Counter(n_of(application))
    assert set(seen) == set(range(100))
    assert {n for n in seen if seen[n] > 1} <= set(range(7))


def n_of(application: Application) -> list[int]:
    return sorted(payload["n"] for payload in application.payloads)


async def test_stop_in_a_handler_is_obeyed_before_the_next_event(publisher: Publisher) -> None:
    fill(publisher, 100)
    seen: list[int] = []

    async with consume(publisher) as consumer:

        async def handle(event: Event) -> None:
            seen.append(event.json()["n"])
            if len(seen) == 3:
                consumer.stop()

        await drain(consumer, handle)
    assert len(seen) == 3


async def test_a_stop_saves_the_cursor_within_what_one_read_brought(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(page_size=1000, checkpoint_every=10)
    fill(publisher, 1000)
    seen: list[int] = []

    async def handle(event: Event) -> None:
        seen.append(event.json()["n"])
        await anyio.lowlevel.checkpoint()
        if len(seen) == 500:
            consumer.stop()

    async with consume(publisher, store=store) as consumer:
        await drain(consumer, handle, max_concurrency=1)
    assert seen == list(range(500))
    async with consume(publisher, store=store, follow=False) as consumer:
        await drain(consumer, handle, max_concurrency=1)
    assert 500 - seen[500] < 40
    assert seen[500:] == list(range(seen[500], 1000))


async def test_the_event_that_came_first_is_handled_first(serve: Callable[..., Publisher]) -> None:
    """One that waited for another of its key is not behind all that came after it."""
    publisher = serve(page_size=100)
    publisher.append(0, {"entity": "e0", "n": 0})
    for n in range(1, 50):
        publisher.append(0, {"entity": "e0" if n == 1 else f"e{n}", "n": n})
    seen: list[int] = []

    async def handle(event: Event) -> None:
        seen.append(event.json()["n"])

    async with consume(publisher, follow=False) as consumer:
        await drain(consumer, handle, max_concurrency=1)
    assert seen == list(range(50))


async def test_a_rolling_deployment_repeats_at_most_what_was_under_way(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    """Ten times, by a handler that takes long: what is done twice was behind the cursor."""
    publisher = serve(page_size=1000, checkpoint_every=10)
    draw = random.Random(7)
    for n in range(3000):
        publisher.append(0, {"entity": f"e{draw.randrange(200)}", "n": n})
    seen: Counter[int] = Counter()
    running: set[int] = set()
    stopped = False
    begun_late = 0

    async def handle(event: Event) -> None:
        nonlocal begun_late, stopped
        begun_late += stopped
        n = event.json()["n"]
        running.add(n)
        for _ in range(8):
            await anyio.lowlevel.checkpoint()
        running.discard(n)
        seen[n] += 1
        if seen.total() >= stop_at:
            stopped = True
            consumer.stop()

    for turn in range(1, 11):
        stop_at, stopped = 200 * turn, False
        async with consume(publisher, store=store) as consumer:
            await drain(consumer, handle, max_concurrency=16)
            assert not running
    stop_at, stopped = 10**9, False
    async with consume(publisher, store=store, follow=False) as consumer:
        await drain(consumer, handle, max_concurrency=16)
    assert begun_late == 0
    assert set(seen) == set(range(3000))
    # The 16 at once, and the lines of which one checkpoint is kept.
    assert seen.total() - 3000 <= 10 * (16 + 32)


@pytest.mark.parametrize("stops", ["while it pauses", "while it is handled"])
async def test_after_a_stop_no_event_is_tried_again(
    publisher: Publisher, store: RecordingStore, stops: str
) -> None:
    fill(publisher, 20, entities=20)
    calls: Counter[int] = Counter()

    async def handle(event: Event) -> None:
        n = event.json()["n"]
        calls[n] += 1
        if n == 7 and not consumer.cut_short:
            if stops == "while it is handled":
                consumer.stop()
            raise ValueError("the service is down")

    policy = Retry(attempts=None, base_delay=1000, max_delay=1000)
    consumer = consume(publisher, store=store)
    async with consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: drain(consumer, handle, on_failure=policy, max_concurrency=1))
        if stops == "while it pauses":
            await wait_until(lambda: calls.total() == 20)
            consumer.stop()
    assert calls[7] == 1
    again = Application()
    async with consume(publisher, store=store, follow=False) as consumer:
        await drain(consumer, again)
    assert 7 in n_of(again)


async def test_the_grace_period_of_stop_ends_what_is_in_flight(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 100)
    application = Application()
    application.blocked["e0"] = anyio.Event()
    async with consume(publisher, store=store) as consumer, anyio.create_task_group() as tasks:
        tasks.start_soon(drain, consumer, application)
        await wait_until(lambda: len(application.payloads) == 80)
        consumer.stop(grace=0.01)
    assert consumer.cut_short
    again = Application()
    async with consume(publisher, store=store, follow=False) as consumer:
        await drain(consumer, again)
    assert again.of("e0") == list(range(0, 100, 5))


async def test_r20_cancellation_ends_it_at_once(publisher: Publisher) -> None:
    fill(publisher, 100)
    application = Application()
    application.blocked["e0"] = anyio.Event()
    async with consume(publisher) as consumer:
        with anyio.move_on_after(0.2) as scope:
            await consumer.run_by_key(application, key=entity)
        assert scope.cancelled_caught
        assert application.running == set()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"handle": entity}, "async"),
        ({"handle": 1}, "function"),
        ({"key": None}, "function"),
        ({"key": Application()}, "without async"),
        ({"max_concurrency": 0}, "at least 1"),
        ({"max_in_flight": 0}, "at least 1"),
        ({"on_failure": "ignore"}, "on_failure"),
    ],
)
async def test_what_is_wrong_is_refused_before_anything_is_read(
    publisher: Publisher, change: dict[str, Any], error: str
) -> None:
    arguments: dict[str, Any] = {"handle": Application(), "key": entity, **change}
    async with consume(publisher) as consumer:
        with pytest.raises((TypeError, ValueError), match=error):
            await consumer.run_by_key(**arguments)
    assert publisher.counters["fetch"] == 0


async def test_whole_key_needs_a_key(publisher: Publisher) -> None:
    async def handle(_: Any) -> None: ...

    async with consume(publisher) as consumer:
        with pytest.raises(ValueError, match="run_by_key"):
            await consumer.run(handle, on_failure=Quarantine(whole_key=True))
