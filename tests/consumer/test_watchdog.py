"""The watchdog: what hangs is found, told, and restarted where that is sound.

On virtual time, so that "within `Limits.stall_timeout`" can be said exactly.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import httpx
import pytest

from feedapi_client import (
    Batch,
    FeedConsumer,
    FeedKey,
    Health,
    Limits,
    MemoryCursorStore,
    Position,
    ProblemName,
    RetryPolicy,
    Share,
)
from feedapi_client.testing import Publisher, faults
from tests.consumer.helpers import LocalFeed, consume, wait_until
from tests.testing.virtual_time import HOUR

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]
in_real_time = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])

STALL = 100.0
LIMITS = Limits(
    stall_timeout=STALL,
    request_timeout=HOUR,
    commit_timeout=HOUR,
    slot_timeout=HOUR,
    discovery_interval=10.0,
)
WELL = Health(live=True, ready=True)
Handler = Callable[[Batch], Awaitable[object]]


class Hang:
    """Hangs, whatever time limit there is, from `began` on."""

    began: float | None = None
    times = 0
    shielded = False

    async def hang_on_purpose(self, *_: object) -> None:
        self.times += 1
        self.began = anyio.current_time()
        with anyio.CancelScope(shield=self.shielded):
            await anyio.sleep(50 * HOUR if self.shielded else float("inf"))


class HangingTransport(httpx.AsyncBaseTransport):
    """Hangs in the requests for which `hangs` is true."""

    def __init__(self, publisher: Publisher, hang: Hang) -> None:
        self.inner, self.hang = httpx.ASGITransport(publisher.asgi), hang
        self.hangs: Callable[[httpx.Request], bool] = lambda _: False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.hangs(request):
            await self.hang.hang_on_purpose()
        return await self.inner.handle_async_request(request)


class HangingStore(MemoryCursorStore):
    """Hangs in `load`, in a `save` after the first, or in a `look` at leases after the first."""

    def __init__(self, operation: str, hang: Hang) -> None:
        super().__init__()
        self.operation, self.hang = operation, hang

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        if self.operation == "load":
            await self.hang.hang_on_purpose()
        return await super().load(feed)

    async def save(self, feed: FeedKey, positions: Mapping[int, Position], **more: Any) -> None:
        if self.operation == "save" and any(each.replaces for each in positions.values()):
            await self.hang.hang_on_purpose()
        await super().save(feed, positions, **more)

    async def look(self, feed: FeedKey, last: Any = None) -> Any:
        view = await super().look(feed, last)
        if self.operation == "look" and view.leases:
            await self.hang.hang_on_purpose()
        return view


class Setting:
    """A consumer of a publisher, both in this process, and what may hang of it."""

    def __init__(
        self, partitions: int = 1, *, store: str = "", own_store: Any = None, **options: Any
    ) -> None:
        """`store`: the operation of a store in which that hangs."""
        self.hang, self.seen = Hang(), list[int]()
        self.publisher = Publisher(partitions)
        for partition in range(partitions):
            self.publisher.extend(partition, [{"n": n} for n in range(3)])
        self.transport = HangingTransport(self.publisher, self.hang)
        self.http = httpx.AsyncClient(transport=self.transport, timeout=None)
        defaults = {"limits": LIMITS, "retry": RetryPolicy(give_up_after=None)}
        own_store = own_store or HangingStore(store, self.hang)
        self.consumer = FeedConsumer(
            "http://feed/feed", http=self.http, store=own_store, **{**defaults, **options}
        )

    async def handle(self, batch: Batch) -> None:
        self.seen.extend(event.json()["n"] for event in batch.events)

    @asynccontextmanager
    async def running(self, handle: Handler | None = None) -> AsyncIterator[None]:
        """Run the handler during the block."""

        async def run() -> None:
            await self.consumer.run(handle or self.handle)

        async with self.iterating(run):
            yield

    @asynccontextmanager
    async def iterating(self, iterate: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
        async def entered() -> None:
            async with self.consumer:
                await iterate()

        async with self.http, anyio.create_task_group() as tasks:
            tasks.start_soon(entered)
            yield
            tasks.cancel_scope.cancel()

    async def until(self, condition: Callable[[Health], object]) -> Health:
        """Wait until the health satisfies a condition."""
        with anyio.fail_after(HOUR):
            while not condition(health := self.consumer.health()):  # noqa: ASYNC110
                await anyio.sleep(0.5)
        return health

    async def hangs(self) -> float:
        """Wait until it hangs. Return since when."""
        await self.until(lambda _: self.hang.began is not None)
        assert self.hang.began is not None
        return self.hang.began

    async def stuck(self, name: ProblemName) -> Health:
        """Check that a hang is no problem before `stall_timeout`, and is one after exactly that."""
        began = await self.hangs()
        await anyio.sleep_until(began + STALL - 1)
        assert name not in names(self.consumer.health())
        await anyio.sleep_until(began + STALL + 0.01)
        health = self.consumer.health()
        assert name in names(health)
        return health

    async def stays_well(self, seconds: float, step: float) -> None:
        ends = anyio.current_time() + seconds
        while anyio.current_time() < ends:
            assert self.consumer.health() == WELL
            await anyio.sleep(step)


def names(health: Health) -> list[str]:
    return [problem.name for problem in health.problems]


def is_fetch(request: httpx.Request) -> bool:
    return bool(request.url.query)


def records(caplog: pytest.LogCaptureFixture, name: ProblemName | None = None) -> list[Any]:
    found = [record for record in caplog.records if hasattr(record, "problem")]
    return [record for record in found if name is None or record.problem == name]  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- what hangs is found


async def test_a_request_that_hangs_is_found_and_made_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setting = Setting()
    setting.transport.hangs = lambda request: is_fetch(request) and not setting.hang.times
    async with setting.running():
        began = await setting.hangs()
        await anyio.sleep_until(began + STALL - 1)
        assert setting.consumer.health() == WELL
        await setting.until(lambda _: setting.seen == [0, 1, 2])
        assert setting.consumer.health().problems == ()
        assert anyio.current_time() < began + STALL + 5
    (record,) = records(caplog, ProblemName.FETCH_STUCK)
    assert (record.partition, record.feed) == (0, "http://feed/feed")
    assert "hang_on_purpose" in record.getMessage(), "the stack of its task"


async def test_a_request_that_not_even_a_restart_ends_needs_a_new_process() -> None:
    setting = Setting()
    setting.hang.shielded, setting.transport.hangs = True, is_fetch
    async with setting.running():
        await setting.until(lambda health: not health.live)
        assert anyio.current_time() - await setting.hangs() >= 2 * STALL
        assert names(setting.consumer.health())[0] == "fetch-stuck"
        assert setting.hang.times == 1


async def test_a_discovery_that_hangs_is_found_and_made_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setting, discoveries = Setting(), 0

    def hangs(request: httpx.Request) -> bool:
        nonlocal discoveries
        discoveries += not is_fetch(request)
        return not is_fetch(request) and discoveries == 2

    setting.transport.hangs = hangs
    async with setting.running():
        began = await setting.hangs()
        await anyio.sleep_until(began + STALL - 1)
        assert setting.consumer.health().problems == ()
        failed = await setting.until(names)
        assert (failed.live, failed.ready) == (True, False)
        await setting.until(lambda health: health == WELL)
        assert discoveries > 2
    (record,) = records(caplog, ProblemName.DISCOVERY_STUCK)
    assert "hang_on_purpose" in record.getMessage()


HANDLER, STORE = ProblemName.HANDLER_STUCK, ProblemName.STORE_STUCK


@pytest.mark.parametrize(
    ("what", "name", "wait", "text", "partition"),
    [
        ("a handler", HANDLER, "application", "has had a batch", 0),
        ("a loop over batches", HANDLER, "application", "has had a batch", 0),
        ("a save", STORE, "save", "saving cursors", 0),
        ("a load on entry", STORE, None, "loading cursors", None),
        ("a look at leases", STORE, None, "looking at the leases", None),
    ],
)
async def test_what_hangs_of_the_application_or_the_store_is_found_and_not_restarted(
    caplog: pytest.LogCaptureFixture,
    what: str,
    name: ProblemName,
    wait: str | None,
    text: str,
    partition: int | None,
) -> None:
    share = Share() if what == "a look at leases" else None
    operations = {"a save": "save", "a load on entry": "load", "a look at leases": "look"}
    setting = Setting(store=operations.get(what, ""), share=share)

    async def loop() -> None:
        async for batch in setting.consumer.batches():
            await setting.hang.hang_on_purpose(batch)

    async def run() -> None:
        handle = setting.hang.hang_on_purpose if what == "a handler" else setting.handle
        await setting.consumer.run(handle)

    async with setting.iterating(loop if what == "a loop over batches" else run):
        await setting.hangs()
        if wait is not None:
            assert setting.consumer.status()[0].wait == wait
        elif share is None:
            assert names(setting.consumer.health()) == ["not-open"]
            assert text in setting.consumer.health().problems[0].text
        health = await setting.stuck(name)
        (problem,) = [each for each in health.problems if each.name is name]
        assert (health.live, health.ready, problem.partition) == (False, False, partition)
        assert text in problem.text
        assert name is HANDLER or "handler-stuck" not in names(health)
        await anyio.sleep(3 * STALL)
        assert setting.hang.times == 1
    if what != "a load on entry":
        (record,) = records(caplog, name)
        assert record.levelno == logging.ERROR
        assert share is not None or "hang_on_purpose" in record.getMessage()


async def test_a_handler_that_hung_and_returns_is_well_again() -> None:
    setting, gate, began = Setting(), anyio.Event(), []

    async def handle(batch: Batch) -> None:
        began.append(anyio.current_time())
        await gate.wait()

    async with setting.running(handle):
        await setting.until(lambda health: "handler-stuck" in names(health))
        status = setting.consumer.status()[0]
        assert "has had a batch" in (status.error or "")
        assert (status.state, status.caught_up) == ("reading", False)
        assert status.since == status.in_flight_since
        gate.set()
        await setting.until(lambda health: health == WELL)
        assert setting.consumer.status()[0].error is None
        assert len(began) == 1


async def test_a_loop_over_events_may_take_long_for_a_batch_and_not_for_an_event() -> None:
    setting, taken = Setting(), 0

    async def slow_loop() -> None:
        nonlocal taken
        async for _ in setting.consumer:
            taken += 1
            await anyio.sleep(STALL * 0.8 if taken < 3 else float("inf"))

    async with setting.iterating(slow_loop):
        await setting.until(lambda _: taken)
        while taken < 3:
            await setting.stays_well(STALL / 20, STALL / 20)
        health = await setting.until(lambda health: health.problems)
        assert names(health) == ["handler-stuck"]
        assert "has had an event for" in health.problems[0].text


async def test_a_partition_that_nobody_will_read_again_is_found_and_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No known fault does this. Here the scheduler is made to forget a partition."""
    setting = Setting()
    async with setting.running():
        await setting.until(lambda _: setting.seen == [0, 1, 2])
        await setting.until(lambda _: setting.consumer.status()[0].wait == "pause")
        session = setting.consumer._session
        assert session is not None
        session.agenda.drop(session.planning.partitions[0])
        assert setting.consumer.status()[0].wait is None
        setting.publisher.append(0, {"n": 3})
        await anyio.sleep(STALL / 2)
        assert setting.seen == [0, 1, 2]
        await setting.until(lambda _: setting.seen == [0, 1, 2, 3])
    assert len(records(caplog, ProblemName.STALLED)) == 1


async def test_an_end_that_the_application_never_commits_is_found() -> None:
    setting = Setting()
    setting.publisher.split(0, 1, method="starts-after")

    async def forgets_to_commit() -> None:
        async for _ in setting.consumer.batches():
            pass

    async with setting.iterating(forgets_to_commit):
        await setting.until(lambda health: names(health) == ["uncommitted"])
        assert setting.consumer.status()[0].wait == "commit"
        assert setting.consumer.status()[1].wait == "parent"


# ---------------------------------------------------------------------- what works is left alone


async def test_a_partition_that_another_instance_reads_is_no_problem(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, share = MemoryCursorStore(), Share()
    first, second = (Setting(2, own_store=store, share=share) for _ in range(2))
    async with first.running(), second.running():
        statuses = first.consumer.status
        await first.until(lambda _: "lease" in [p.wait for p in statuses().partitions.values()])
        for _ in range(20):
            await anyio.sleep(STALL / 3)
            assert first.consumer.health() == second.consumer.health() == WELL
    assert records(caplog) == []


async def test_nothing_is_reported_of_a_consumer_that_works(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither while events come, nor while none come for long, nor at a handler that is slow."""
    setting = Setting(3)

    async def handle(_: Batch) -> None:
        await anyio.sleep(STALL * 0.9)

    async with setting.running(handle):
        await anyio.sleep(STALL / 3)
        await setting.stays_well(7 * STALL, STALL / 3)
        setting.publisher.split(0, 2, method="starts-after")
        await setting.stays_well(7 * STALL, STALL / 3)
    assert records(caplog) == []


# ---------------------------------------------------------------------- the event loop


@in_real_time
async def test_an_event_loop_that_is_blocked_is_found_by_another_thread() -> None:
    feed, found = LocalFeed(), threading.Event()
    feed.numbers(0, 0)
    consumer = feed.consume(limits=Limits(stall_timeout=0.05))

    def watch() -> None:
        while "event-loop-blocked" not in names(consumer.health()):
            pass
        found.set()

    async def block(_: Batch) -> None:
        threading.Thread(target=watch, daemon=True).start()
        assert found.wait(60)
        consumer.stop()

    async with consumer:
        await consumer.run(block)


@in_real_time
async def test_a_blocked_event_loop_is_named_and_no_request_is_blamed(publisher: Publisher) -> None:
    publisher.fail(faults.Hang(), times=None)

    async def handle(_: Batch) -> None: ...

    def is_reported() -> bool:
        assert "fetch-stuck" not in names(consumer.health())
        return any("event loop did not run" in each for each in consumer.status().reports)

    async with (
        consume(publisher, limit={"stall_timeout": 0.6}) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(consumer.run, handle)
        await wait_until(lambda: publisher.counters["fetch"])
        time.sleep(1.7)  # noqa: ASYNC251 - what is tested
        await wait_until(is_reported)
        tasks.cancel_scope.cancel()


# ---------------------------------------------------------------------- health


async def test_the_health_of_a_consumer_from_its_making_to_its_end() -> None:
    feed = LocalFeed()
    consumer = feed.consume()

    async def handle(_: Batch) -> None: ...

    seen = [consumer.health()]
    async with consumer:
        seen.append(consumer.health())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consumer.run, handle)
            await wait_until(lambda: consumer.health().ready)
            seen.append(consumer.health())
            consumer.stop()
        seen.append(consumer.health())
    seen.append(consumer.health())
    none, idle = ["not-open"], ["not-iterating"]
    assert [names(health) for health in seen] == [none, idle, [], idle, none]
    assert [health.live for health in seen] == [True] * 5
    assert [health.ready for health in seen] == [False, False, True, False, False]


async def test_a_handler_that_ends_the_iteration_is_no_health() -> None:
    feed = LocalFeed()
    feed.numbers(0, 0)

    async def fail(_: Batch) -> None:
        raise ValueError("no such customer")

    async with feed.consume() as consumer:
        with suppress(ValueError):
            await consumer.run(fail)
        health = consumer.health()
        assert not health.live
        assert names(health) == ["failed"]
        assert health.problems[0].partition == 0
        assert "the handler failed with ValueError" in health.problems[0].text
        assert "ValueError" in (consumer.status()[0].error or "")


async def test_no_problem_of_many_is_left_out() -> None:
    setting = Setting(150)

    def refuse(request: httpx.Request) -> bool:
        if is_fetch(request):
            raise httpx.ConnectError("refused")
        return False

    setting.transport.hangs = refuse
    async with setting.running():
        health = await setting.until(lambda health: len(health.problems) == 150)
        assert health.live
        assert {problem.partition for problem in health.problems} == set(range(150))
