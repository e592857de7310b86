"""`run_by_key(event_id=...)`: exactly once by key, across crashes, splits and lost leases."""

from __future__ import annotations

import logging
import sqlite3
import uuid
from collections.abc import Iterator
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
from feedapi_client.quarantine.quarantine_store import quarantine_beside
from feedapi_client.stores.done import DONE_FORMAT, stored_id
from feedapi_client.telemetry import observe
from tests.by_key.helpers import KeyFeed, drain, entity, kept, number
from tests.consumer.helpers import SAFETY_LIMIT, rediscovered, wait_until

pytestmark = pytest.mark.anyio


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


class LedgerFeed(KeyFeed):
    """A feed whose events have their number as identity, and the ledger that it is applied to."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.ledger = Ledger(path)
        super().__init__(**{"store": SQLiteCursorStore(path), **settings})

    def split_options(self, options: dict[str, Any]) -> tuple[FeedConsumer, dict[str, Any]]:
        return super().split_options({"event_id": number, **options})

    async def crash(self, *, key: str = "e0") -> None:
        """End while an event of one key hangs and all others are done."""
        ledger = self.ledger
        done = [payload for payload in self.payloads() if payload["entity"] != key]
        ledger.blocked[key] = anyio.Event()
        async with self.draining(ledger, crashes=True):
            await wait_until(lambda: len(ledger.effects) == len(done))
        ledger.blocked.clear()
        ledger.calls.clear()

    def check_once(self) -> None:
        """Each event has one effect, and each entity's are in order."""
        self.check(self.ledger.effects)

    async def aside(self) -> list[int]:
        """The numbers of the events in the quarantine beside the cursors."""
        async with SQLiteCursorStore(self.ledger.path) as store:
            quarantine = quarantine_beside(store)
            await quarantine.prepare()
            return await kept(quarantine)


@pytest.fixture
def feed(tmp_path: Path) -> LedgerFeed:
    return LedgerFeed(tmp_path / "app.db")


@pytest.fixture
def ledger(feed: LedgerFeed) -> Ledger:
    return feed.ledger


async def test_r05_a_stop_repeats_nothing_of_what_is_done(feed: LedgerFeed, ledger: Ledger) -> None:
    feed.fill(0, 60, entities=12)

    async def stops(event: Event) -> None:
        await ledger(event)
        if number(event) % 20 == 13:
            consumer.stop()

    for _ in range(3):
        async with feed.consume() as consumer:
            await drain(consumer, stops, event_id=number, max_concurrency=4)
    assert len(ledger.calls) < 60
    await feed.drain(ledger)
    assert len(ledger.calls) == 60
    feed.check_once()
    assert ledger.remembered == 0


async def test_a_stop_saves_the_cursor_as_far_as_all_before_it_is_done(
    feed: LedgerFeed, ledger: Ledger
) -> None:
    """Also of a handler that remembers nothing; and what is passed is forgotten, nothing else."""
    feed.page_size, feed.checkpoint_every = 100, 1
    feed.fill(0, 60, entities=60)

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

    policy = Retry(base_delay=1000, max_delay=1000)
    async with feed.consume() as consumer:
        await drain(consumer, stops, event_id=number, max_concurrency=1, on_failure=policy)
    assert ledger.calls == list(range(31))
    assert 10 <= ledger.remembered < 20
    await feed.drain(ledger)
    assert ledger.calls[31:] == [20, *range(31, 60)]
    assert ledger.remembered == 0


async def test_r05_identity_counts_and_not_the_place_in_a_page(
    feed: LedgerFeed, ledger: Ledger
) -> None:
    feed.fill(0, 60, entities=4)
    for page_size, checkpoint_every in ((7, 3), (60, 60), (4, 2)):
        await feed.crash()
        feed.page_size, feed.checkpoint_every = page_size, checkpoint_every
    await feed.drain(ledger)
    feed.check_once()
    assert ledger.remembered == 0


async def test_what_is_done_is_forgotten_with_the_cursor_that_passes_it(
    feed: LedgerFeed, ledger: Ledger
) -> None:
    feed.fill(0, 100, entities=50)
    gate = ledger.blocked["e42"] = anyio.Event()
    async with feed.draining(ledger, limit={"max_batch_events": 5}):
        # e42 is in the ninth batch: what is before it is forgotten, and it keeps the rest.
        await wait_until(lambda: len(ledger.effects) == 98 and ledger.remembered == 58)
        gate.set()
        await wait_until(lambda: len(ledger.effects) == 100 and ledger.remembered == 0)
    feed.check_once()


@pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
async def test_r09_successors_know_what_is_done_in_their_ancestors(
    feed: LedgerFeed, ledger: Ledger, method: Any
) -> None:
    feed.fill(0, 40, entities=8)
    await feed.crash()
    for partition in feed.split(0, method=method):
        if method == "cursor-from":
            feed.split(partition, method=method)  # and its position stays the ancestor's
            break
    feed.fill(40, 80, entities=8)
    await feed.drain(ledger)
    assert sorted(ledger.calls) == sorted({*range(0, 40, 8), *range(40, 80)})
    feed.check_once()
    assert ledger.remembered == 0


# ---------------------------------------------------------------------- what handlers do


class OddHandlers(Ledger):
    """Handlers that do something else with their transaction."""

    async def fails_behind_done(self, event: Event) -> None:
        with self.transaction() as connection:
            connection.execute("INSERT INTO effects VALUES (?, ?)", (entity(event), number(event)))
            await event.done(transaction=connection)
            if number(event) not in self.calls:
                self.calls.append(number(event))
                raise RuntimeError("at the last moment")

    async def does_it_again(self, event: Event) -> None:
        for _ in range(2):
            await self.apply(event)

    async def begins_another_transaction(self, event: Event) -> None:
        try:
            with self.transaction() as connection:
                await event.done(transaction=connection)
                raise RuntimeError("a deadlock, say")
        except RuntimeError:
            await self(event)

    async def ignores(self, event: Event) -> None:
        with self.transaction() as connection:
            connection.execute("INSERT INTO effects VALUES (?, ?)", (entity(event), number(event)))


@pytest.mark.parametrize(
    ("handle", "options"),
    [
        ("fails_behind_done", {"on_failure": Retry(base_delay=0.001)}),
        ("does_it_again", {}),
        ("begins_another_transaction", {}),
        ("ignores", {}),
    ],
)
async def test_r05_an_event_counts_as_done_once_with_its_transaction(
    feed: LedgerFeed, handle: str, options: dict[str, Any]
) -> None:
    feed.fill(0, 20, entities=4)
    odd = OddHandlers(feed.ledger.path)
    await feed.drain(getattr(odd, handle), **options)
    await feed.drain(getattr(odd, handle), **options)
    feed.check_once()


@pytest.mark.parametrize("on_failure", ["raise", Retry(base_delay=0.001), "quarantine"])
async def test_r05_a_failure_behind_the_commit_repeats_nothing(
    feed: LedgerFeed, ledger: Ledger, on_failure: Any, caplog: pytest.LogCaptureFixture
) -> None:
    feed.fill(0, 20, entities=4)

    async def fails_behind_the_commit(event: Event) -> None:
        await ledger(event)
        raise RuntimeError(f"secret {number(event)}")

    with caplog.at_level(logging.WARNING):
        await feed.drain(fails_behind_the_commit, on_failure=on_failure)
    feed.check_once()
    assert caplog.text.count("the event is done, although its handler failed") == 20
    assert await feed.aside() == []


async def test_done_twice_in_one_transaction_is_an_error_that_rolls_back(
    feed: LedgerFeed, ledger: Ledger
) -> None:
    feed.fill(0, 1)

    async def twice(event: Event) -> None:
        with ledger.transaction() as connection:
            connection.execute("INSERT INTO effects VALUES (?, ?)", (entity(event), number(event)))
            await event.done(transaction=connection)
            with pytest.raises(AlreadyDoneError):
                await event.done(transaction=connection)
            raise AlreadyDoneError("of the handler")

    with pytest.raises(AlreadyDoneError):
        await feed.drain(twice)
    assert ledger.effects == []
    await feed.drain(ledger)
    feed.check_once()


async def test_without_a_transaction_it_is_remembered_at_once(tmp_path: Path) -> None:
    feed = LedgerFeed(tmp_path / "app.db", store=MemoryCursorStore())
    feed.fill(0, 40, entities=4)
    seen, gate = list[int](), anyio.Event()

    async def handle(event: Event) -> None:
        if entity(event) == "e0":
            await gate.wait()
        seen.append(number(event))
        await event.done()

    async with feed.draining(handle, crashes=True):
        await wait_until(lambda: len(seen) == 30)
    gate.set()
    await feed.drain(handle)
    assert sorted(seen) == list(range(40))


async def test_done_is_for_handlers_with_event_id(feed: LedgerFeed, ledger: Ledger) -> None:
    feed.fill(0, 5)
    events: list[Event] = []

    async def keeps(event: Event) -> None:
        events.append(event)
        with pytest.raises(CommitOrderError, match="event_id"):
            await event.done()

    async def handles(event: Event) -> None:
        events.append(event)
        await ledger(event)

    await feed.drain(keeps, event_id=None)
    feed.fill(5, 10)
    await feed.drain(handles)
    assert len(events) == 10
    for event in events:
        with pytest.raises(CommitOrderError, match="while it handles"):
            await event.done()


async def test_a_failing_event_and_its_key_go_into_quarantine(
    feed: LedgerFeed, ledger: Ledger
) -> None:
    feed.fill(0, 40, entities=4)

    async def poison(event: Event) -> None:
        if number(event) == 5:
            raise RuntimeError("poison")
        await ledger(event)

    await feed.drain(poison, on_failure=Quarantine(whole_key=True))
    done = [n for n in range(40) if n % 4 != 1 or n < 5]
    assert sorted(effect["n"] for effect in ledger.effects) == done
    assert ledger.remembered == 0


# ---------------------------------------------------------------------- what is passed over


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


@pytest.mark.parametrize(
    ("why", "passed"), [("equal events are in flight", 10), ("they were done before a crash", 30)]
)
async def test_what_is_passed_over_is_told_and_counted(
    feed: LedgerFeed, ledger: Ledger, why: str, passed: int
) -> None:
    if why == "they were done before a crash":
        feed.fill(0, 40, entities=4)
        await feed.crash()
        assert ledger.remembered == 30
    else:
        for _ in range(2):
            feed.fill(0, 10, entities=4)
    told = Told()
    async with feed.consume(follow=False) as consumer:
        with told.of(consumer):
            await drain(consumer, ledger, event_id=number)
    assert {effect["n"] for effect in ledger.effects} == {p["n"] for p in feed.payloads()}
    assert len(ledger.effects) == len({effect["n"] for effect in ledger.effects})
    assert (told.notified, told.counted, told.shown) == (passed, passed, passed)
    assert ledger.remembered == 0


# ---------------------------------------------------------------------- identities


def per_entity(event: Event) -> int:
    return number(event) // 4


async def test_an_event_with_the_id_of_another_is_an_error_or_put_aside_and_lost_by_no_crash(
    feed: LedgerFeed, ledger: Ledger
) -> None:
    feed.fill(0, 40, entities=4)
    options: dict[str, Any] = {"event_id": per_entity, "on_failure": "quarantine"}
    with pytest.raises(FeedError, match="two events with one event_id have different payloads"):
        await feed.drain(ledger, name="raises", event_id=per_entity)
    with ledger.transaction() as connection:
        connection.execute("DELETE FROM effects")
    ledger.blocked["e0"] = anyio.Event()
    async with feed.draining(ledger, crashes=True, **options):
        await wait_until(lambda: ledger.running == {0})
    ledger.blocked.clear()
    await feed.drain(ledger, **options)
    done = [effect["n"] for effect in ledger.effects]
    assert sorted(await feed.aside() + done) == list(range(40))


@pytest.mark.parametrize("wrong", [None, True, 1.5, "", b"", ["a"]])
async def test_an_event_without_an_identity_fails_by_itself(
    feed: LedgerFeed, ledger: Ledger, wrong: object
) -> None:
    feed.fill(0, 20, entities=4)

    def event_id(event: Event) -> object:
        return wrong if number(event) == 7 else number(event)

    with pytest.raises((TypeError, ValueError)):
        await feed.drain(ledger, event_id=event_id)
    await feed.drain(ledger, event_id=event_id, on_failure="quarantine")
    assert sorted(effect["n"] for effect in ledger.effects) == [n for n in range(20) if n != 7]
    assert 7 not in ledger.calls


def test_an_identity_is_stored_as_a_digest() -> None:
    values = ("5", b"5", 5, uuid.UUID(int=5), "\ud800", "x" * 100_000, -5, 10**40)
    stored = {stored_id(value) for value in values}
    assert len(stored) == len(values)
    assert all(each.startswith(DONE_FORMAT) and len(each) <= 64 for each in stored)
    # What 1.0.0 writes: every later version has to find it.
    assert stored_id("event-1") == "1:c7cdf4bbbbdc5dc0d1a70905c6aeffb59d6df6dd"
    assert stored_id(5) == "1:1a9ea7b940bc7e7dce3ee64030ee17d2b437e87a"


async def test_what_a_newer_version_has_done_is_not_taken_for_nothing(
    feed: LedgerFeed, ledger: Ledger
) -> None:
    feed.fill(0, 8, entities=4)
    await feed.crash()
    with ledger.transaction() as connection:
        connection.execute(
            "UPDATE feedapi_cursors_done SET event_id = '2:' || substr(event_id, 3) "
            "WHERE event_id <> ''"
        )
    with pytest.raises(StoreError, match="newer version"):
        await feed.drain(ledger)
    assert ledger.calls == []


class Plain:
    """A store that remembers cursors alone."""

    async def load(self, feed: FeedKey) -> dict[int, Any]:
        return {}

    async def save(self, feed: FeedKey, positions: Any, *, transaction: Any = None) -> None: ...


@pytest.mark.parametrize("store", [Plain(), RedisCursorStore("redis://127.0.0.1:1")])
async def test_a_store_that_can_not_remember_is_refused_before_anything_is_read(
    feed: LedgerFeed, ledger: Ledger, store: Any
) -> None:
    with pytest.raises(TypeError, match=r"remembers what is done \(event_id\)"):
        await feed.consume(store=store).run_by_key(ledger, key=entity, event_id=number)
    assert feed.counters["fetch"] == 0


# ---------------------------------------------------------------------- others, and claims


async def test_r17_a_second_consumer_takes_over_and_the_first_one_does_nothing_more(
    feed: LedgerFeed, ledger: Ledger
) -> None:
    feed.fill(0, 40, entities=4)
    gates = {f"e{n}": anyio.Event() for n in range(4)}
    first, second = Ledger(ledger.path), Ledger(ledger.path)
    first.blocked.update(gates)

    async def run_first() -> None:
        with pytest.raises(FencedError):
            await feed.drain(first, follow=True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_first)
        await wait_until(lambda: len(first.running) == 4)
        gates["e0"].set()
        await wait_until(lambda: len(ledger.effects) == 10)
        await feed.drain(second, store=SQLiteCursorStore(ledger.path))
        for gate in gates.values():
            gate.set()
    feed.check_once()


async def test_r17_a_lost_lease_refuses_what_its_handlers_still_do(
    feed: LedgerFeed, ledger: Ledger
) -> None:
    """The new owner has passed the event, and forgotten it, when the old one wants to do it."""
    feed.fill(0, 40, entities=4)
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

    async with feed.draining(late, share=share) as first:
        await wait_until(lambda: first.status().events == 40)
        # Somebody whom the lease was not lost to, as after a partition of the network.
        await feed.drain(ledger, store=SQLiteCursorStore(ledger.path))
        feed.check_once()
        assert ledger.remembered == 0
        gate.set()
        await wait_until(lambda: len(refused) == 4)
        feed.fill(40, 50, entities=4)
        await wait_until(lambda: len(ledger.effects) == 50 and not ledger.remembered)
    feed.check_once()


def before_claims_of_0(store: Any, wait: Any) -> Any:
    """Wait before each claim of partition 0."""
    take_over = store.take_over

    async def slow(feed: Any, partitions: Any, revision: int) -> Any:
        if partitions[0] == 0:
            await wait()
        return await take_over(feed, partitions, revision)

    store.take_over = slow
    return store


async def test_a_claim_that_waits_keeps_no_other_partition_waiting(tmp_path: Path) -> None:
    gate, seen = anyio.Event(), set[int]()
    store = before_claims_of_0(MemoryCursorStore(), gate.wait)
    feed = LedgerFeed(tmp_path / "app.db", partitions=2, store=store)
    feed.fill(0, 40, entities=8)

    async def handle(event: Event) -> None:
        seen.add(event.partition)
        await event.done()

    async with feed.draining(handle):
        await wait_until(lambda: seen == {1})
        await rediscovered(feed)
        assert seen == {1}
        gate.set()
        await wait_until(lambda: seen == {0, 1})


async def test_a_failing_claim_is_retried_or_ends_the_iteration(
    feed: LedgerFeed, ledger: Ledger
) -> None:
    feed.fill(0, 10)
    failures = [1, 2, 3]

    async def breaks() -> None:
        if failures:
            failures.pop()
            raise OSError("the server is away")

    before_claims_of_0(feed.store, breaks)
    with pytest.raises(StoreError, match="claiming a partition failed: OSError"):
        await feed.drain(ledger)
    await feed.drain(ledger, on_failure=Retry(base_delay=0.001))
    feed.check_once()


async def test_r09_a_partition_that_is_superseded_while_it_is_claimed_is_given_up(
    feed: LedgerFeed, ledger: Ledger
) -> None:
    feed.fill(0, 10)
    began, gate = anyio.Event(), anyio.Event()

    async def waits() -> None:
        began.set()
        await gate.wait()

    before_claims_of_0(feed.store, waits)
    async with feed.draining(ledger) as consumer:
        await began.wait()
        feed.split(0, method="cursor-from")
        await wait_until(lambda: consumer.status()[0].state == "superseded")
        await wait_until(lambda: len(ledger.effects) == 10)
        gate.set()
        feed.fill(10, 20)
        await wait_until(lambda: len(ledger.effects) == 20)
    feed.check_once()
