"""`FeedConsumer.run_by_key`: each key in order, keys at once, cursors behind what is done."""

from __future__ import annotations

import logging
import random
from collections import Counter
from datetime import datetime, tzinfo
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from feedapi_client import Event, PartitionState, Quarantine, Retry, StoreError
from feedapi_client.quarantine import operations, quarantine_beside
from feedapi_client.quarantine.quarantine_store import MemoryQuarantineStore
from feedapi_client.status import ProblemName
from tests.by_key.helpers import Application, KeyFeed, entity, kept, number
from tests.consumer.helpers import rediscovered, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]
SMALL = {"max_batch_events": 5}


@pytest.mark.parametrize(
    ("entities", "options", "most", "settings"),
    [
        pytest.param(7, {}, 7, {}, id="keys at once"),
        pytest.param(50, {"max_concurrency": 3}, 3, {}, id="no more than max_concurrency"),
        pytest.param(
            *(5, {"max_in_flight": 7}, 5, {"page_size": 100, "checkpoint_every": 50}),
            id="checkpoints further apart than max_in_flight",
        ),
    ],
)
async def test_r04_each_key_is_handled_in_order_and_once(
    entities: int, options: dict[str, Any], most: int, settings: dict[str, int]
) -> None:
    feed, application = KeyFeed(**settings), Application()
    feed.fill(0, 200, entities=entities)
    for _ in range(2):
        await feed.drain(application, **options)
        feed.check(application.payloads)
    assert application.most == most


@pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
async def test_r04_the_order_of_a_key_holds_across_splits(method: Any) -> None:
    feed, application = KeyFeed(page_size=7, checkpoint_every=3), Application("e0")
    feed.fill(0, 50)
    async with feed.draining(application) as consumer:
        await wait_until(lambda: len(application.payloads) == 40)
        children = feed.split(0, method=method)
        feed.fill(50, 100)
        await wait_until(lambda: set(children) <= set(consumer.status().partitions))
        await rediscovered(feed)
        for p in children:
            assert consumer.status()[p].state is PartitionState.WAITING
            assert consumer.status()[p].events == 0
        application.gate.set()
        await wait_until(lambda: len(application.payloads) >= 100)
    feed.check(application.payloads)


async def test_r05_the_cursor_never_passes_an_unfinished_event() -> None:
    feed, application, again = KeyFeed(), Application("e2"), Application()
    feed.fill(0, 40, entities=4)
    async with feed.draining(application, crashes=True, limit=SMALL) as consumer:
        await wait_until(lambda: len(application.payloads) == 30)
        await wait_until(lambda: consumer.status()[0].events == 40)
        assert len(feed.store.saves) <= 1  # the first position of an empty store
    await feed.drain(again)
    assert again.of("e2") == application.of("e2") + list(range(2, 40, 4))
    feed.check(again.payloads)


async def test_r05_one_cursor_covers_all_batches_that_are_done_while_the_store_is_slow() -> None:
    feed, application = KeyFeed(), Application()
    feed.fill(0, 100, entities=4)
    gate = feed.store.hold(lambda saved: any(each.replaces for each in saved.values()))
    async with feed.draining(application, follow=False, limit=SMALL) as consumer:
        await wait_until(lambda: len(application.payloads) == 100)
        assert consumer.status()[0].in_flight_seconds is not None
        gate.opened.set()
        await wait_until(lambda: consumer.status()[0].in_flight_since is None)
    assert len(feed.store.saves) <= 4  # with the first position
    assert await feed.store.cursors() == {0: feed.end_cursor(0)}


# ---------------------------------------------------------------------- bounds


@pytest.mark.parametrize("bound", ["events", "bytes"])
async def test_r16_memory_is_bounded_behind_one_event_that_hangs(bound: str) -> None:
    """What Parallel Consumer's users see: memory grows behind one slow event."""
    feed, application = KeyFeed(), Application("e3")
    feed.fill(0, 1000, entities=10)
    limit = {**SMALL, "max_batch_bytes": 1000}
    options: dict[str, Any] = {"max_in_flight": 60} if bound == "events" else {}
    if bound == "bytes":
        limit["max_buffered_bytes"] = 40_000
    async with feed.draining(application, limit=limit, **options) as consumer:
        await wait_until(lambda: application.running == {"e3"} and len(application.payloads) > 20)
        delivered, before = consumer.status()[0].events, -1
        while delivered != before:
            await rediscovered(feed, 4)
            delivered, before = consumer.status()[0].events, delivered
        assert delivered < 300
        if bound == "events":
            assert delivered <= 60
            assert len(application.payloads) <= 54
        application.gate.set()
        await wait_until(lambda: len(application.payloads) == 1000)
    feed.check(application.payloads)


async def test_health_says_what_holds_a_cursor_back_and_never_the_key() -> None:
    feed, application = KeyFeed(), Application("e1")
    feed.fill(0, 40, entities=4)
    limit = {"stall_timeout": 0.3, **SMALL}
    async with feed.draining(application, crashes=True, limit=limit) as consumer:
        await wait_until(lambda: not consumer.health().live)
        await wait_until(lambda: len(application.payloads) == 30)
        problem = next(p for p in consumer.health().problems if p.partition == 0)
        assert problem.name is ProblemName.HANDLER_STUCK
        assert "38 later events" in problem.text
        assert "e1" not in problem.text
        application.gate.set()
        await wait_until(lambda: consumer.health().live)
        assert consumer.health().problems == ()


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])  # virtual time waits for the others
async def test_a_handler_that_never_waits_lets_others_run() -> None:
    feed, turns = KeyFeed(), 0
    feed.fill(0, 3000, entities=3)

    async def others() -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    async def busy(event: Event) -> None:
        for _ in range(300):
            event.json()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(others)
        await feed.drain(busy)
        tasks.cancel_scope.cancel()
    assert turns > 20


# ---------------------------------------------------------------------- failures

QUICK: dict[str, Any] = {"base_delay": 0.001, "max_delay": 0.002}


@pytest.mark.parametrize(
    ("policy", "calls", "note"),
    [
        pytest.param("raise", 1, None, id="at once"),
        pytest.param(Retry(attempts=3, **QUICK), 3, None, id="after its retries"),
        pytest.param(
            *(Quarantine(to=MemoryQuarantineStore(), limit=5), 6, "5 events in a row"),
            id="after too many in quarantine",
        ),
    ],
)
async def test_a_handler_that_always_fails_ends_the_iteration(
    policy: Any, calls: int, note: str | None
) -> None:
    feed, called = KeyFeed(), 0
    feed.fill(0, 50)

    async def handle(_: Event) -> None:
        nonlocal called
        called += 1
        raise RuntimeError("always")

    with pytest.raises(RuntimeError, match="always") as raised:
        await feed.drain(handle, on_failure=policy, max_concurrency=1)
    assert called >= calls
    assert note is None or note in raised.value.__notes__[0]


async def test_r05_an_error_of_the_handler_loses_nothing_and_is_logged_without_payload(
    caplog: pytest.LogCaptureFixture,
) -> None:
    feed, application, again = KeyFeed(), Application(), Application()
    feed.fill(0, 50)

    async def fails(event: Event) -> None:
        if number(event) == 33:
            raise RuntimeError(f"no such entity: {entity(event)}")
        await application(event)

    with caplog.at_level(logging.ERROR, "feedapi_client"):
        async with feed.consume() as consumer:
            with pytest.raises(RuntimeError, match="no such entity"):
                await consumer.run_by_key(fails, key=entity)
            assert not consumer.health().live
    assert "partition 0: the handler failed with RuntimeError" in caplog.text
    assert "e3" not in caplog.text  # which stands in the payload (R19)
    await feed.drain(again)
    assert {*application.numbers, *again.numbers} == set(range(50))
    assert 33 in again.numbers


async def test_a_failing_event_is_retried_while_other_keys_go_on() -> None:
    """A poison event must not hold the lag without a word, nor a place among the handlers."""
    feed, application = KeyFeed(), Application(poison=[n for n in range(100) if n % 4 < 2])
    feed.fill(0, 100, entities=4)
    forever = Retry(attempts=None, base_delay=0.01, max_delay=0.02)
    async with feed.draining(application, max_concurrency=1, on_failure=forever) as consumer:
        await wait_until(lambda: len(application.payloads) == 50)
        await wait_until(lambda: consumer.status()[0].events == 100)
        health = consumer.health()
        assert health.live
        assert [p.name for p in health.problems] == [ProblemName.HANDLER_FAILING]
        assert "99 later events" in health.problems[0].text
        status = consumer.status()[0]
        assert status.state is PartitionState.RETRYING
        assert status.handler_failures > 1
        application.poison.clear()
        await wait_until(lambda: len(application.payloads) == 100)
        await wait_until(lambda: consumer.health().problems == ())
        assert consumer.status()[0].error is None
    feed.check(application.payloads)


async def test_a_failing_event_goes_into_quarantine_and_its_key_goes_on() -> None:
    feed, application, quarantine = (
        KeyFeed(),
        Application(poison=[7, 12, 30]),
        MemoryQuarantineStore(),
    )
    feed.fill(0, 50)
    consumer = await feed.drain(application, on_failure=Quarantine(to=quarantine))
    assert consumer.status()[0].quarantined == 3
    assert sorted(await kept(quarantine)) == [7, 12, 30]
    assert application.of("e2") == [2, *range(17, 50, 5)]
    assert await feed.store.cursors() == {0: feed.end_cursor(0)}


async def test_with_whole_key_later_events_of_a_key_wait_for_the_replay() -> None:
    feed, application, quarantine = KeyFeed(), Application(poison=[7]), MemoryQuarantineStore()
    policy = Quarantine(to=quarantine, whole_key=True, limit=1)
    feed.fill(0, 20)
    await feed.drain(application, on_failure=policy)
    assert application.of("e2") == [2]
    # In another run, too: what is held back is read from the quarantine.
    feed.fill(20, 30)
    application.poison.clear()
    await feed.drain(application, on_failure=policy)
    assert application.of("e2") == [2]
    assert await kept(quarantine) == [7, 12, 17, 22, 27]
    await operations.replay(quarantine, application.replayed)
    feed.fill(30, 40)
    await feed.drain(application, on_failure=policy)
    feed.check(application.payloads)


async def test_with_whole_key_a_clock_that_is_set_back_does_not_change_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class SetBack(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> SetBack:
            hours.append(len(hours))
            return cls(2026, 10, 25, 23 - hours[-1], tzinfo=tz)

    hours: list[int] = []
    monkeypatch.setattr("feedapi_client.quarantine.record.datetime", SetBack)
    feed, application, quarantine = KeyFeed(), Application(poison=[2]), MemoryQuarantineStore()
    policy = Quarantine(to=quarantine, whole_key=True)
    feed.fill(0, 20)
    await feed.drain(application, on_failure=policy)
    feed.fill(20, 30)
    await feed.drain(application, on_failure=policy)
    assert await kept(quarantine) == [2, 7, 12, 17, 22, 27]
    application.poison.clear()
    await operations.replay(quarantine, application.replayed)
    feed.check(application.payloads)


async def test_a_replay_beside_a_running_consumer_lets_the_key_go_on() -> None:
    feed, application, quarantine = KeyFeed(), Application(poison=[2]), MemoryQuarantineStore()
    feed.fill(0, 10)
    policy = Quarantine(to=quarantine, whole_key=True)
    async with feed.draining(application, on_failure=policy) as consumer:
        await wait_until(lambda: consumer.status()[0].quarantined == 2)
        application.poison.clear()
        await operations.replay(quarantine, application.replayed)
        feed.fill(10, 20)
        await wait_until(lambda: len(application.payloads) == 20)
    feed.check(application.payloads)


@pytest.mark.parametrize("beside", [True, False])
async def test_r07_adopted_cursors_have_their_quarantined_events_with_them(beside: bool) -> None:
    feed, application = KeyFeed(), Application(poison=[7])
    quarantine = quarantine_beside(feed.store) if beside else MemoryQuarantineStore()
    policy = Quarantine(to=None if beside else quarantine, whole_key=True)
    feed.fill(0, 20)
    await feed.drain(application, on_failure=policy)
    application.poison.clear()
    feed.fill(20, 30)
    key = (await feed.drain(application, feed_name="orders", on_failure=policy)).key
    assert await kept(quarantine, key) == [7, 12, 17, 22, 27]
    await operations.replay(quarantine, application.replayed, feed=key)
    feed.check(application.payloads)


class OwnQuarantine:
    """A quarantine of the application's own, which has the methods of the protocol alone."""

    def __init__(self) -> None:
        store = MemoryQuarantineStore()
        self.prepare, self.add, self.remove = store.prepare, store.add, store.remove
        self.page, self.get = store.page, store.get


@pytest.mark.parametrize("by_key", [True, False])
async def test_r07_quarantined_events_that_nobody_can_take_along_refuse_the_start(
    by_key: bool,
) -> None:
    feed, policy = KeyFeed(), Quarantine(to=OwnQuarantine())
    feed.fill(0, 1)

    async def handle(_: Any) -> None:
        raise RuntimeError("poison")

    async def run(**options: Any) -> None:
        if by_key:
            await feed.drain(handle, on_failure=policy, **options)
            return
        async with feed.consume(follow=False, **options) as consumer:
            await consumer.run(handle, on_failure=policy)

    await run()
    with pytest.raises(StoreError, match="replay or drop them"):
        await run(feed_name="orders")


async def test_r07_quarantined_events_stay_with_cursors_that_are_not_adopted() -> None:
    """Both keys are in use: the events are those of the URL's consumer."""
    feed, quarantine = KeyFeed(), MemoryQuarantineStore()
    feed.fill(0, 10)
    options: dict[str, Any] = {"start": "first", "on_failure": Quarantine(to=quarantine)}
    await feed.drain(Application(), feed_name="orders", **options)
    url = (await feed.drain(Application(poison=[2, 7]), **options)).key
    await feed.drain(Application(), feed_name="orders", **options)
    assert await kept(quarantine, url) == [2, 7]


async def test_an_event_without_a_key_is_one_that_fails() -> None:
    feed, application, quarantine = KeyFeed(), Application(), MemoryQuarantineStore()
    feed.fill(0, 20)
    feed.append(0, {"n": 20})
    feed.fill(21, 30)
    with pytest.raises(KeyError):
        await feed.drain(application)
    await feed.drain(application, on_failure=Quarantine(to=quarantine, whole_key=True))
    assert await kept(quarantine) == [20]


@pytest.mark.parametrize("policy", ["raise", Retry(attempts=None, **QUICK)])
async def test_r05_a_save_that_fails_is_raised_or_with_retry_tried_again(policy: Any) -> None:
    feed, application, failures = KeyFeed(), Application(), 3
    feed.fill(0, 20)

    async def before_save(_: Any) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise StoreError("the disk is full")

    async with feed.consume(follow=False) as consumer:
        feed.store.before_save = before_save
        if policy == "raise":
            with pytest.raises(StoreError, match="the disk is full"):
                await consumer.run_by_key(application, key=entity)
            return
        await consumer.run_by_key(application, key=entity, on_failure=policy)
    feed.check(application.payloads)
    assert await feed.store.cursors() == {0: feed.end_cursor(0)}


# ---------------------------------------------------------------------- the end


async def test_stop_begins_nothing_and_finishes_what_was_begun() -> None:
    feed = KeyFeed(page_size=100, checkpoint_every=1)
    feed.fill(0, 100, entities=50)
    application = Application(*(f"e{n}" for n in range(50)))
    async with feed.draining(application, max_concurrency=7) as consumer:
        await wait_until(lambda: len(application.running) == 7)
        consumer.stop()
        await wait_until(lambda: consumer.health().ready)
        application.gate.set()
    assert sorted(application.numbers) == list(range(7))
    assert not consumer.cut_short
    await feed.drain(application)
    seen = Counter(application.numbers)
    assert set(seen) == set(range(100))
    assert {n for n in seen if seen[n] > 1} <= set(range(7))


async def test_a_stop_in_a_handler_saves_the_cursor_within_what_one_read_brought() -> None:
    """And is obeyed before the next event."""
    feed, seen = KeyFeed(page_size=1000, checkpoint_every=10), []
    feed.fill(0, 1000)
    async with feed.consume() as consumer:

        async def handle(event: Event) -> None:
            seen.append(number(event))
            await anyio.lowlevel.checkpoint()
            if len(seen) == 500:
                consumer.stop()

        await consumer.run_by_key(handle, key=entity, max_concurrency=1)
    assert seen == list(range(500))
    await feed.drain(handle, max_concurrency=1)
    assert 500 - seen[500] < 40
    assert seen[500:] == list(range(seen[500], 1000))


async def test_the_event_that_came_first_is_handled_first() -> None:
    """One that waited for another of its key is not behind all that came after it."""
    feed, application = KeyFeed(page_size=100), Application()
    for n in range(50):
        feed.numbers(0, n, entity="e0" if n == 1 else f"e{n}")
    await feed.drain(application, max_concurrency=1)
    assert application.numbers == list(range(50))


async def test_a_rolling_deployment_repeats_at_most_what_was_under_way() -> None:
    """Ten times, by a handler that takes long: what is done twice was behind the cursor."""
    feed, draw = KeyFeed(page_size=1000, checkpoint_every=10), random.Random(7)
    for n in range(3000):
        feed.numbers(0, n, entity=f"e{draw.randrange(200)}")
    seen: Counter[int] = Counter()
    running: set[int] = set()
    stopped = False
    begun_late = 0

    async def handle(event: Event) -> None:
        nonlocal begun_late, stopped
        begun_late += stopped
        running.add(number(event))
        for _ in range(8):
            await anyio.lowlevel.checkpoint()
        running.discard(number(event))
        seen[number(event)] += 1
        if seen.total() >= stop_at:
            stopped = True
            consumer.stop()

    for turn in range(1, 11):
        stop_at, stopped = 200 * turn, False
        async with feed.consume() as consumer:
            await consumer.run_by_key(handle, key=entity, max_concurrency=16)
            assert not running
    stop_at, stopped = 10**9, False
    await feed.drain(handle, max_concurrency=16)
    assert begun_late == 0
    assert set(seen) == set(range(3000))
    # The 16 at once, and the lines of which one checkpoint is kept.
    assert seen.total() - 3000 <= 10 * (16 + 32)


@pytest.mark.parametrize("stops", ["while it pauses", "while it is handled"])
async def test_after_a_stop_no_event_is_tried_again(stops: str) -> None:
    feed, again = KeyFeed(), Application()
    feed.fill(0, 20, entities=20)
    calls: Counter[int] = Counter()

    async def handle(event: Event) -> None:
        calls[number(event)] += 1
        if number(event) == 7:
            if stops == "while it is handled":
                consumer.stop()
            raise ValueError("the service is down")

    policy = Retry(attempts=None, base_delay=1000, max_delay=1000)
    async with feed.draining(handle, on_failure=policy, max_concurrency=1) as consumer:
        await wait_until(lambda: calls[7])
    assert calls[7] == 1
    await feed.drain(again)
    assert 7 in again.numbers


async def test_the_grace_period_of_stop_ends_what_is_in_flight() -> None:
    feed, application, again = KeyFeed(), Application("e0"), Application()
    feed.fill(0, 100)
    async with feed.draining(application) as consumer:
        await wait_until(lambda: len(application.payloads) == 80)
        consumer.stop(grace=0.01)
    assert consumer.cut_short
    await feed.drain(again)
    assert again.of("e0") == list(range(0, 100, 5))


async def test_r20_cancellation_ends_it_at_once() -> None:
    feed, application = KeyFeed(), Application("e0")
    feed.fill(0, 100)
    async with feed.consume() as consumer:
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
        ({"key": Application.__call__}, "without async"),
        ({"max_concurrency": 0}, "at least 1"),
        ({"max_in_flight": 0}, "at least 1"),
        ({"on_failure": "ignore"}, "on_failure"),
        ({"event_id": "id"}, "event_id"),
        ({"event_id": 5}, "event_id"),
        ({"event_id": anyio.sleep}, "event_id"),
    ],
)
async def test_what_is_wrong_is_refused_before_anything_is_read(
    change: dict[str, Any], error: str
) -> None:
    feed = KeyFeed()
    arguments: dict[str, Any] = {"handle": Application.__call__, "key": entity, **change}
    async with feed.consume() as consumer:
        with pytest.raises((TypeError, ValueError), match=error):
            await consumer.run_by_key(**arguments)
    assert feed.counters["fetch"] == 0


async def test_whole_key_needs_a_key() -> None:
    async def handle(_: Any) -> None: ...

    async with KeyFeed().consume() as consumer:
        with pytest.raises(ValueError, match="run_by_key"):
            await consumer.run(handle, on_failure=Quarantine(whole_key=True))
