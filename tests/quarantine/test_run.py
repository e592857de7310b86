"""`FeedConsumer.run(handle, on_failure=...)`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import anyio
import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feedapi_client import (
    Batch,
    Event,
    FeedConsumer,
    FencedError,
    Limits,
    MemoryCursorStore,
    Position,
    SQLiteCursorStore,
    StoreError,
)
from feedapi_client.quarantine import (
    MemoryQuarantineStore,
    SQLiteQuarantineStore,
)
from feedapi_client.quarantine.policy import Quarantine, Retry
from feedapi_client.testing import Publisher
from tests.quarantine.helpers import Ledger, PoisonError, kept, numbers, retry, run

pytestmark = pytest.mark.anyio

THREE_TIMES = retry(3)
ALL = list(range(20))


def without(*poison: int) -> list[int]:
    return [n for n in ALL if n not in poison]


@pytest.mark.parametrize(
    ("poison", "on_failure", "why", "calls"),
    [
        ({7}, "raise", "can't handle 7", 1),
        ({3}, THREE_TIMES, "can't handle 3", 3),
        ({3}, Retry(attempts=3, errors=(OSError,)), "can't handle 3", 1),
        ({7}, Quarantine(errors=(ValueError,)), "can't handle 7", 1),
        ({2, *range(5, 15)}, Quarantine(limit=4), "4 events in a row", None),
    ],
    ids=["raise", "retry", "another error", "no fault of an event", "too many in a row"],
)
async def test_an_error_that_ends_the_consumer_leaves_nothing_of_the_batch(
    ledger: Ledger,
    poison: set[int],
    on_failure: Any,
    why: str,
    calls: int | None,
) -> None:
    with pytest.raises(PoisonError) as caught:
        await ledger.run(ledger.handler(poison), on_failure)
    assert why in f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert calls in (None, len(ledger.calls))
    assert ledger.rows() == await ledger.kept() == []


@pytest.mark.parametrize("moment", ["before", "after the commit", "after a commit of its own"])
async def test_r05_an_error_that_no_event_causes_is_raised(ledger: Ledger, moment: str) -> None:
    """With an event in quarantine already, where the handler's transaction holds it, too."""
    errors = {"before": StoreError("down"), "after the commit": OSError("the disk is full")}
    error, ended = errors.get(moment, PoisonError("too late")), 0

    async def handle(batch: Batch) -> None:
        nonlocal ended
        if moment == "before":
            raise error
        with ledger.transaction() as connection:
            if moment == "after the commit":
                ledger.write(connection, batch, {7})
            await batch.commit(transaction=connection if moment == "after the commit" else None)
            ended += 1
            raise error

    errors_of_events = Quarantine(errors=(PoisonError,))
    with pytest.raises(type(error)):
        await ledger.run(handle, Retry(attempts=1, then=errors_of_events))
    assert ended == (moment != "before")
    assert ledger.rows() == await ledger.kept() == []
    saved = moment == "after a commit of its own"
    end = ledger.publisher.end_cursor(0) if saved else "_first"
    assert await ledger.cursor() == end


async def test_retry_commits_a_batch_whose_first_transaction_failed_after_the_commit(
    ledger: Ledger,
) -> None:
    calls: list[list[int]] = []

    async def handle(batch: Batch) -> None:
        calls.append(numbers(batch))
        if len(calls) > 1:
            return  # this time the commit is left to run()
        with ledger.transaction() as connection:
            await batch.commit(transaction=connection)
            raise PoisonError("after the cursor was saved in the transaction")

    await ledger.run(handle, THREE_TIMES)
    await ledger.run(handle, THREE_TIMES)
    assert [n for call in calls for n in call] == ALL + ALL


def _listed(numbers: set[int]) -> str:
    # The order of a set differs between a module that was just compiled and a cached one.
    return ", ".join(map(str, sorted(numbers)))


@pytest.mark.parametrize(
    "poison", [{0}, {7}, {19}, {0, 1, 2}, {3, 4, 11, 19}, set(ALL)], ids=_listed
)
async def test_only_the_failing_events_are_quarantined_and_the_rest_is_handled_once(
    ledger: Ledger, poison: set[int]
) -> None:
    await ledger.run(ledger.handler(poison))
    assert ledger.rows() == without(*poison)
    quarantined = await ledger.kept()
    assert [orjson.loads(event.raw)["n"] for event in quarantined] == sorted(poison)
    assert [event.index for event in quarantined] == sorted(poison)
    for event, n in zip(quarantined, sorted(poison), strict=True):
        assert (event.error_type, event.error) == ("PoisonError", f"can't handle {n}")
        assert (event.partition, event.cursor) == (0, ledger.publisher.end_cursor(0))
        assert event.feed.url == ledger.publisher.url
        assert event.time.tzinfo is not None
    ledger.publisher.append(0, {"entity": "e0", "n": 20})
    await ledger.run(ledger.handler(poison))
    assert ledger.rows() == [*without(*poison), 20]


async def test_an_event_may_need_the_effects_of_the_events_before_it(ledger: Ledger) -> None:
    """Each event needs the effect of the one before it of its entity: it would fail alone."""

    async def handle(batch: Batch) -> None:
        with ledger.transaction() as connection:
            for n in numbers(batch):
                found = connection.execute(
                    "SELECT count(*) FROM effects WHERE n = ?", (n - 3,)
                ).fetchone()[0]
                if n == 10 or (n > 2 and n != 13 and found != 1):
                    raise PoisonError(n)
                connection.execute("INSERT INTO effects VALUES (?)", (n,))
            await batch.commit(transaction=connection)

    await ledger.run(handle)
    assert ledger.rows() == without(10)


async def test_an_event_that_fails_now_and_then_is_not_quarantined_after_retries(
    ledger: Ledger,
) -> None:
    seen = {7: 0}
    good = ledger.handler(set())

    async def handle(batch: Batch) -> None:
        if 7 in numbers(batch):
            seen[7] += 1
            if seen[7] % 5:
                raise PoisonError(7)
        await good(batch)

    await ledger.run(handle, retry(6, then=Quarantine()))
    assert ledger.rows() == ALL
    assert await ledger.kept() == []


async def test_r17_a_fenced_consumer_ends_with_any_on_failure(ledger: Ledger) -> None:
    calls = 0

    async def handle(batch: Batch) -> None:
        nonlocal calls
        calls += 1
        (feed,) = await ledger.store.feeds()
        await ledger.store.replace(feed, await ledger.store.load(feed))
        await ledger.handler(())(batch)

    with pytest.raises(FencedError):
        await ledger.run(handle, retry(5, then=Quarantine()))
    assert calls == 1
    assert ledger.rows() == []


async def test_failing_events_in_a_row_are_counted_over_batches(ledger: Ledger) -> None:
    ledger.publisher.page_size = ledger.publisher.checkpoint_every = 1

    async def one_by_one(batch: Batch) -> None:
        assert len(batch) <= 1
        await ledger.handler(range(5, 15))(batch)

    async with FeedConsumer(
        ledger.publisher.url or "",
        store=ledger.store,
        follow=False,
        limits=Limits(max_batch_bytes=1),
    ) as consumer:
        with pytest.raises(PoisonError, match="can't handle 9"):
            await consumer.run(one_by_one, on_failure=Quarantine(limit=4))
    assert ledger.rows() == [0, 1, 2, 3, 4]
    assert [event.index for event in await ledger.kept()] == [0, 0, 0, 0]


async def test_a_batch_without_events_that_fails_is_raised(
    feedapi_publisher_factory: Any, store: SQLiteCursorStore
) -> None:
    publisher = feedapi_publisher_factory()
    publisher.append_internal(0, 3)

    async def handle(batch: Batch) -> None:
        assert not batch.events
        raise PoisonError("nothing in it")

    with pytest.raises(PoisonError):
        await run(publisher, store, handle, "quarantine")


async def test_a_failing_partition_does_not_delay_the_others(
    feedapi_publisher_factory: Any, store: SQLiteCursorStore
) -> None:
    publisher = feedapi_publisher_factory(2)
    publisher.append(0, {"entity": "a", "n": 0})
    publisher.append(1, {"entity": "b", "n": 1})
    other = anyio.Event()

    async def handle(batch: Batch) -> None:
        if batch.partition == 0 and not other.is_set():
            raise PoisonError(0)
        if batch.partition == 1:
            other.set()

    await run(publisher, store, handle, retry(None))
    assert other.is_set()


async def test_cancellation_ends_the_retries(ledger: Ledger) -> None:
    inner = ledger.handler({0})

    async def handle(batch: Batch) -> None:
        if len(ledger.calls) == 2:
            scope.cancel()
        await inner(batch)

    with anyio.CancelScope() as scope:
        await ledger.run(handle, retry(None))
    assert scope.cancelled_caught
    assert len(ledger.calls) == 3
    assert ledger.rows() == []


async def test_what_another_place_holds_of_a_failed_save_is_not_put_there_twice(
    publisher: Publisher, tmp_path: Path
) -> None:
    class Failing(MemoryCursorStore):
        async def save_passing(self, feed: Any, positions: Any, *rest: Any, **within: Any) -> None:
            if positions[0].cursor != "_first" and await kept(elsewhere) and not failed:
                failed.append(True)
                raise StoreError("not now")
            await super().save_passing(feed, positions, *rest, **within)

    async def handle(event: Any) -> None:
        if event.json()["n"] in (4, 9):
            raise PoisonError

    failed: list[bool] = []
    elsewhere = SQLiteQuarantineStore(tmp_path / "quarantine.db")
    policy = retry(2, then=Quarantine(to=elsewhere))
    store = Failing()
    async with FeedConsumer(publisher.url or "", store=store, follow=False) as consumer:
        await consumer.run_by_key(handle, key=lambda event: 1, on_failure=policy)
    assert failed
    assert [event.index for event in await kept(elsewhere)] == [4, 9]
    await elsewhere.aclose()


@pytest.mark.parametrize("arrives", [False, True])
async def test_r05_the_save_with_a_quarantined_event_outlasts_a_dead_connection(
    ledger: Ledger, arrives: bool
) -> None:
    """It is a save of the consumer's own. It may have arrived, and its reply be lost."""
    save, left = ledger.store.save_passing, 1

    async def dies(feed: Any, positions: Any, *args: Any, transaction: Any = None) -> None:
        nonlocal left
        died = left and transaction is not None
        if not died or arrives:
            await save(feed, positions, *args, transaction=transaction)
        if died:
            left -= 1
            raise StoreError("the connection is dead") from ConnectionResetError()

    async def handle(batch: Batch) -> None:
        with ledger.transaction() as connection:
            ledger.write(connection, batch, {7})

    ledger.store.save_passing = dies  # type: ignore[method-assign]
    await ledger.run(handle)
    assert left == 0
    assert ledger.rows() == without(7)
    assert len(await ledger.kept()) == 1
    assert await ledger.cursor() == ledger.publisher.end_cursor(0)


@pytest.mark.parametrize("by_key", [False, True])
async def test_a_store_without_a_quarantine_is_refused_before_anything_is_read_and_logged(
    publisher: Publisher, caplog: pytest.LogCaptureFixture, by_key: bool
) -> None:
    class Foreign:
        async def load(self, feed: object) -> dict[int, object]:
            return {}

        async def save(
            self, feed: object, positions: object, *, transaction: object = None
        ) -> None:
            pass

    async def handle(_: object) -> None:
        raise AssertionError

    async with FeedConsumer(publisher.url or "", store=Foreign()) as consumer:
        handled = (
            consumer.run_by_key(handle, key=Event.json, on_failure="quarantine")
            if by_key
            else consumer.run(handle, on_failure="quarantine")
        )
        with pytest.raises(StoreError, match="Foreign has no quarantine: say where"):
            await handled
    (record,) = (each for each in caplog.records if each.levelno == logging.ERROR)
    assert "Foreign has no quarantine" in record.getMessage()


async def test_the_end_of_a_dry_run_passes_through_the_handlers_own_code(ledger: Ledger) -> None:
    """Its except clauses do not see it, and its task groups end."""
    own: list[Exception] = []

    async def handle(batch: Batch) -> None:
        try:
            with ledger.transaction() as connection:
                ledger.write(connection, batch, {7})
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(batch.commit, connection)
        except Exception as error:
            own.append(error)
            raise

    await ledger.run(handle)
    assert ledger.rows() == without(7)
    assert {type(error) for error in own} == {PoisonError}


async def test_r19_no_payload_and_no_error_text_in_the_log(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(batch: Batch) -> None:
        for event in batch.events:
            if event.json()["n"] == 7:
                raise PoisonError(event.raw.decode())
        await batch.commit()

    with caplog.at_level(logging.DEBUG, logger="feedapi_client"):
        await ledger.run(handle, retry(2, then=Quarantine()))
    (event,) = await ledger.kept()
    text = "\n".join(record.getMessage() for record in caplog.records) + repr(event)
    assert "quarantined event" in text
    assert "PoisonError" in text
    assert "entity" not in text
    assert '"n"' not in text


async def never(batch: Batch) -> None:
    raise AssertionError


@pytest.mark.parametrize(
    "make",
    [
        *(lambda wrong=wrong: wrong for wrong in ("stop", None, 3, Exception)),
        lambda: Retry(attempts=0),
        lambda: Retry(base_delay=0),
        lambda: Retry(max_delay=0.1, base_delay=1),
        lambda: Retry(then="quarantine"),  # type: ignore[arg-type]
        lambda: Quarantine(limit=0),
    ],
)
async def test_what_is_no_on_failure_is_refused(publisher: Publisher, make: Any) -> None:
    with pytest.raises(ValueError, match=r"on_failure must be|Retry|Quarantine"):
        await run(publisher, None, never, make())


# Any failing events


class Database:
    """Effects and a cursor, with one transaction at a time. The call number `fails` fails."""

    def __init__(self, poison: set[int], fails: int | None) -> None:
        self.poison, self.fails, self.calls = poison, fails, 0
        self.effects: list[int] = []
        self.positions: dict[int, Position] = {}

    async def load(self, feed: object) -> dict[int, Position]:
        return dict(self.positions)

    async def save(
        self, feed: object, positions: dict[int, Position], *, transaction: Any = None
    ) -> None:
        self.positions |= positions

    def apply(self, batch: Batch) -> None:
        self.calls += bool(batch.events)
        if self.calls == self.fails:
            self.fails = None
            raise OSError
        for n in numbers(batch):
            if n in self.poison:
                raise PoisonError(n)
            self.effects.append(n)

    async def in_transaction(self, batch: Batch) -> None:
        before = list(self.effects), dict(self.positions)
        try:
            self.apply(batch)
            await batch.commit(transaction=self)
        except BaseException:
            self.effects, self.positions = before
            raise

    async def without(self, batch: Batch) -> None:
        self.apply(batch)


def handled(
    count: int, poison: set[int], *, rolls_back: bool, retries: bool, fails: int | None = None
) -> tuple[Database, list[int]]:
    """Handle one batch; return what is there, and the indices of the quarantined events."""
    publisher = Publisher(page_size=count, checkpoint_every=count)
    publisher.extend(0, [{"n": n} for n in range(count)])
    database, quarantined = Database(poison, fails), MemoryQuarantineStore()
    policy = Quarantine(to=quarantined, limit=count)
    retried = Retry(attempts=2, base_delay=1e-6, max_delay=1e-6, then=policy)
    handle = database.in_transaction if rolls_back else database.without

    async def main() -> list[int]:
        http = httpx.AsyncClient(transport=httpx.ASGITransport(publisher.asgi))
        url = "http://service/feed"
        async with http, FeedConsumer(url, store=database, http=http, follow=False) as consumer:
            await consumer.run(handle, on_failure=retried if retries else policy)
        assert database.positions[0].cursor == publisher.end_cursor(0)
        return [event.index for event in await kept(quarantined)]

    return database, anyio.run(main)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, set[int]]:
    count = draw(st.integers(1, 60))
    return count, draw(st.sets(st.integers(0, count - 1)))


@settings(max_examples=40)
@given(batches(), st.booleans(), st.booleans())
def test_r05_whatever_events_fail_the_others_are_there_in_order(
    batch: tuple[int, set[int]], rolls_back: bool, retries: bool
) -> None:
    count, poison = batch
    database, quarantined = handled(count, poison, rolls_back=rolls_back, retries=retries)
    good = [n for n in range(count) if n not in poison]
    assert quarantined == sorted(poison)
    assert list(dict.fromkeys(database.effects)) == good
    # Without a transaction: once in each attempt at the whole batch, and once more alone.
    times = 1 if rolls_back else 2 + retries
    assert all(database.effects.count(n) <= times for n in good)


@settings(max_examples=40)
@given(batches(), st.booleans(), st.booleans(), st.integers(1, 40))
def test_a_call_that_fails_for_no_event_hides_none_behind_it(
    batch: tuple[int, set[int]], rolls_back: bool, retries: bool, fails: int
) -> None:
    """A database that is locked during one dry run: the events of that run are not to blame."""
    count, poison = batch
    try:
        database, quarantined = handled(
            count, poison, rolls_back=rolls_back, retries=retries, fails=fails
        )
    except OSError:
        return  # in the last attempt at all events, each of which had passed
    # The event that is tried alone when the database fails can't be told from one that fails.
    assert len(set(quarantined) - poison) <= 1
    assert set(quarantined) >= poison
    assert set(database.effects) == set(range(count)) - set(quarantined)


def test_the_number_of_calls_grows_with_the_logarithm_of_the_batch() -> None:
    database, quarantined = handled(4096, {2500}, rolls_back=True, retries=False)
    assert quarantined == [2500]
    assert database.calls < 20
