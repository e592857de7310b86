"""R5 commit, R6 drained, R7 bootstrap, R17 fencing."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest

from feedapi_client import (
    Batch,
    CommitOrderError,
    FencedError,
    LineageError,
    NoProgressError,
    Position,
    RequestRefusedError,
    RetryPolicy,
    SQLiteCursorStore,
    StoreError,
)
from feedapi_client.testing import Publisher, Quirks, Request, faults
from feedapi_client.testing.publisher import Response
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    BrokenStore,
    RecordingStore,
    Transaction,
    consume,
    fill,
    n_of,
    next_batch,
    nothing_comes,
    numbers,
    read_n,
    rediscovered,
    take,
    wait_until,
)
from tests.positions import stand

pytestmark = pytest.mark.anyio

SMALL = {"max_batch_bytes": 1}
"""Deliver each checkpoint, or each page, as a batch of its own."""


# ---------------------------------------------------------------------- R5


async def test_r05_async_for_commits_a_batch_when_the_loop_asks_for_the_event_after_it(
    publisher: Publisher, store: RecordingStore
) -> None:
    publisher.page_size = publisher.checkpoint_every = 3
    numbers(publisher, 0, range(6))
    async with consume(publisher, store=store, limit=SMALL) as consumer:
        events = aiter(consumer)
        await take(events, 3)
        assert await store.cursors() == {0: "_first"}
        await take(events, 1)
        assert len(store.saves) == 2


async def test_r05_batches_commits_nothing_by_itself(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(30))
    async with consume(publisher, store=store, follow=False) as consumer:
        with anyio.fail_after(SAFETY_LIMIT):
            assert [
                n for batch in [b async for b in consumer.batches()] for n in n_of(batch.events)
            ] == list(range(30))
    assert await store.cursors() == {0: "_first"}


async def test_r05_run_commits_when_the_handler_returns(
    publisher: Publisher, store: RecordingStore
) -> None:
    end = numbers(publisher, 0, range(3))
    before = []

    async def handle(batch: Batch) -> None:
        before.append(await store.cursors())

    async with consume(publisher, store=store, follow=False) as consumer:
        await consumer.run(handle)
    assert before[0] == {0: "_first"}
    assert await store.cursors() == {0: end}


async def test_r05_run_does_not_commit_again_what_the_handler_committed(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(3))

    async def handle(batch: Batch) -> None:
        await batch.commit()

    async with consume(publisher, store=store, follow=False) as consumer:
        await consumer.run(handle)
    assert len(store.saves) == 2


@pytest.mark.parametrize("how", ["break", "exception", "cancellation", "leaving the block"])
async def test_r05_leaving_the_loop_in_any_way_commits_nothing_more(
    publisher: Publisher, store: RecordingStore, how: str
) -> None:
    publisher.page_size = publisher.checkpoint_every = 3
    numbers(publisher, 0, range(9))

    async def work() -> None:
        async with consume(publisher, store=store, limit=SMALL) as consumer:
            async for event in consumer:
                if event.json()["n"] != 5:  # the last event of the second batch
                    continue
                if how == "break":
                    break
                if how == "exception":
                    raise ZeroDivisionError
                if how == "cancellation":
                    scope.cancel()
                    await anyio.sleep(0.001)
                return

    with anyio.CancelScope() as scope:
        try:
            await work()
        except ZeroDivisionError:
            assert how == "exception"
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == [3, 4, 5, 6, 7, 8]


async def test_r05_an_event_loop_left_in_the_middle_of_a_batch_repeats_it(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(5))
    async with consume(publisher, store=store) as consumer:
        await take(aiter(consumer), 4)
    assert await store.cursors() == {0: "_first"}


async def test_r05_a_handler_that_fails_commits_nothing(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(5))

    async def handle(batch: Batch) -> None:
        raise ZeroDivisionError

    async with consume(publisher, store=store) as consumer:
        with pytest.raises(ZeroDivisionError):
            await consumer.run(handle)
    assert await store.cursors() == {0: "_first"}


async def test_r05_a_cancelled_commit_is_finished_first(
    publisher: Publisher, store: RecordingStore
) -> None:
    end = numbers(publisher, 0, range(5))
    async with consume(publisher, store=store) as consumer:
        batch = await next_batch(consumer.batches())
        saving, go_on = anyio.Event(), anyio.Event()

        async def slowly(_: Mapping[int, Position]) -> None:
            saving.set()
            await go_on.wait()

        store.before_save = slowly
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(batch.commit)
            await saving.wait()
            tasks.cancel_scope.cancel()
            go_on.set()
    assert await store.cursors() == {0: end}


async def test_r05_a_save_that_hangs_is_given_up_in_time(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(5))
    async with consume(publisher, store=store, limit={"commit_timeout": 0.05}) as consumer:
        batch = await next_batch(consumer.batches())

        async def never(_: Mapping[int, Position]) -> None:
            await anyio.sleep_forever()

        store.before_save = never
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(StoreError, match="commit_timeout"):
            await batch.commit()


async def test_r05_after_a_rollback_the_same_batch_is_committed_again_against_the_same_predecessor(
    publisher: Publisher, store: RecordingStore
) -> None:
    publisher.page_size = publisher.checkpoint_every = 2
    end = numbers(publisher, 0, range(4))
    async with consume(publisher, store=store, limit=SMALL) as consumer:
        batches = consumer.batches()
        batch = await next_batch(batches)
        rolled_back = [Transaction(), Transaction()]
        for transaction in rolled_back:
            await batch.commit(transaction)
        first = (await store.positions())[0].revision
        assert {change[0].replaces for t in rolled_back for _, change in t.changes} == {first}
        assert len({change[0].revision for t in rolled_back for _, change in t.changes}) == 1
        transaction = Transaction()
        await batch.commit(transaction)
        await store.commit(transaction)
        batch = await next_batch(batches)
        await batch.commit()
    assert await store.cursors() == {0: end}


async def test_r05_who_asks_for_the_next_batch_after_a_rollback_is_told_what_to_do(
    publisher: Publisher, store: RecordingStore
) -> None:
    publisher.page_size = publisher.checkpoint_every = 2
    end = numbers(publisher, 0, range(4))
    async with consume(publisher, store=store, limit=SMALL) as consumer:
        batches = consumer.batches()
        batch = await next_batch(batches)
        await batch.commit(Transaction())  # which is rolled back
        await next_batch(batches)
        with pytest.raises(CommitOrderError, match="Commit again before you ask, or begin"):
            await batch.commit()
        batch = await next_batch(consumer.batches())
        assert n_of(batch.events) == [0, 1]
        await batch.commit()
        await (await next_batch(consumer.batches())).commit()
    assert await store.cursors() == {0: end}


async def test_r05_lineage_does_not_advance_before_the_application_asks_for_the_next_batch(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(2))
    (child,) = publisher.split(0, 1)
    numbers(publisher, child, [2])
    async with consume(publisher, store=store) as consumer:
        batches = consumer.batches()
        batch = await next_batch(batches)
        await batch.commit(Transaction())  # which is rolled back
        await rediscovered(publisher)
        assert consumer.status()[child].waits_for == (0,)
        assert child not in {request.partition for request in publisher.requests}
        await batch.commit()
        assert n_of((await next_batch(batches)).events) == [2]


async def test_r05_a_rolled_back_sqlite_transaction_takes_the_cursor_with_it(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.page_size = publisher.checkpoint_every = 2
    numbers(publisher, 0, range(6))
    file = tmp_path / "effects.db"
    database = sqlite3.connect(file)
    database.execute("CREATE TABLE effects (n INTEGER PRIMARY KEY)")
    database.commit()
    refused = 0
    async with (
        SQLiteCursorStore(file) as store,
        consume(publisher, store=store, follow=False, limit=SMALL) as consumer,
    ):
        with anyio.fail_after(SAFETY_LIMIT):
            async for batch in consumer.batches():
                for attempt in range(3):
                    database.executemany(
                        "INSERT INTO effects VALUES (?)", [(n,) for n in n_of(batch.events)]
                    )
                    await batch.commit(transaction=database)
                    if attempt < 2:
                        database.rollback()
                        refused += 1
                database.commit()
    assert refused >= 6
    assert [n for (n,) in database.execute("SELECT n FROM effects ORDER BY rowid")] == list(
        range(6)
    )
    database.close()
    async with (
        SQLiteCursorStore(file) as store,
        consume(publisher, store=store, follow=False) as consumer,
    ):
        assert await read_n(consumer) == []


async def test_r05_committing_out_of_order_is_an_error_and_saves_nothing(
    publisher: Publisher, store: RecordingStore
) -> None:
    publisher.page_size = publisher.checkpoint_every = 2
    numbers(publisher, 0, range(4))
    async with consume(publisher, store=store, limit=SMALL) as consumer:
        batches = consumer.batches()
        first = await next_batch(batches)
        second = await next_batch(batches)
        await second.commit()
        saved = await store.positions()
        with pytest.raises(CommitOrderError, match="partition 0"):
            await first.commit()
        assert await store.positions() == saved


async def test_r05_committing_twice_is_harmless(
    publisher: Publisher, store: RecordingStore
) -> None:
    end = numbers(publisher, 0, range(4))
    async with consume(publisher, store=store) as consumer:
        batch = await next_batch(consumer.batches())
        await batch.commit()
        await batch.commit()
    assert await store.cursors() == {0: end}
    assert len(store.saves) == 2


async def test_r05_a_batch_of_an_iteration_that_ended_is_not_committed(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(4))
    async with consume(publisher, store=store) as consumer:
        stale = await next_batch(consumer.batches())
        await take(aiter(consumer))
        with pytest.raises(CommitOrderError, match="iteration"):
            await stale.commit()
    with pytest.raises(CommitOrderError):
        await stale.commit()
    assert await store.cursors() == {0: "_first"}


async def test_r05_a_store_that_fails_is_a_store_error_without_the_drivers_text(
    publisher: Publisher,
) -> None:
    numbers(publisher, 0, range(4))
    store = BrokenStore()
    store.broken = False
    async with consume(publisher, store=store) as consumer:
        batches = consumer.batches()
        batch = await next_batch(batches)
        store.broken = True
        with pytest.raises(StoreError, match="saving cursors failed: ConnectionError") as caught:
            await batch.commit()
        assert "hunter2" not in str(caught.value)
        assert isinstance(caught.value.__cause__, ConnectionError)
        store.broken = False
        await batch.commit()
        numbers(publisher, 0, [4])
        assert n_of((await next_batch(batches)).events) == [4]


async def test_r05_a_store_that_fails_in_the_background_ends_the_iteration(
    publisher: Publisher,
) -> None:
    store = BrokenStore()
    with pytest.raises(StoreError):
        await consume(publisher, store=store).__aenter__()
    store.broken = False
    async with consume(publisher, store=store) as consumer:
        numbers(publisher, 0, [1])
        events = aiter(consumer)
        await take(events)
        await wait_until(lambda: consumer.status()[0].state == "caught up")
        store.broken = True
        publisher.split(0, method="cursor-from")
        with pytest.raises(StoreError):
            await take(events)


async def test_r05_an_iteration_begun_during_a_save_of_the_one_before_does_not_fence_itself(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 10)
    async with consume(publisher, store=store) as consumer:
        batches = consumer.batches()
        await (await next_batch(batches)).commit()
        async with nothing_comes(batches):  # asks for the next, so that the first batch counts
            await wait_until(lambda: consumer.status()[0].caught_up)
        saving, go_on = anyio.Event(), anyio.Event()

        async def slowly(_: Mapping[int, Position]) -> None:
            saving.set()
            await go_on.wait()

        store.before_save = slowly
        publisher.split(0, method="cursor-from")
        await saving.wait()  # the transfer of the cursor
        fill(publisher, 10, start=10)
        events = aiter(consumer)

        async def let_the_save_go_on() -> None:
            await anyio.wait_all_tasks_blocked()
            go_on.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(let_the_save_go_on)
            assert sorted(n_of(await take(events, 10))) == list(range(10, 20))


async def test_r05_a_late_commit_and_a_transfer_of_the_same_partition_do_not_fence_each_other(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(2)
    numbers(publisher, 0, [0])
    async with consume(publisher, store=store) as consumer:
        batches = consumer.batches()
        late = await next_batch(batches, 0)
        numbers(publisher, 1, [1])
        await (await next_batch(batches, 1)).commit()
        saving, go_on = anyio.Event(), anyio.Event()

        async def slowly(positions: Mapping[int, Position]) -> None:
            if 0 in positions and positions[0].cursor == late.cursor:
                saving.set()
                await go_on.wait()

        store.before_save = slowly
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(late.commit)
            await saving.wait()
            publisher.split(0, 1, method="cursor-from")
            await rediscovered(publisher)
            go_on.set()
        numbers(publisher, 2, [2])
        assert n_of((await next_batch(batches)).events) == [2]
    assert (await store.statuses())[0] == "superseded"


async def test_r05_a_late_commit_wakes_an_iteration_that_waits_for_it(publisher: Publisher) -> None:
    numbers(publisher, 0, [0])
    publisher.split(0, 1)
    numbers(publisher, 1, [1])
    async with consume(publisher) as consumer, anyio.create_task_group() as tasks:
        batches = consumer.batches()
        parent = await next_batch(batches)

        async def commit() -> None:
            await wait_until(lambda: consumer.status().reports)
            await parent.commit()

        tasks.start_soon(commit)
        assert n_of((await next_batch(batches)).events) == [1]


async def test_r05_two_commits_of_one_partition_at_once_are_out_of_order(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, range(2))
    saving, go_on = anyio.Event(), anyio.Event()

    async def before_save(_: Mapping[int, Position]) -> None:
        saving.set()
        await go_on.wait()

    async with consume(publisher, store=store, limit=SMALL) as consumer:
        batch = await next_batch(consumer.batches())
        store.before_save = before_save
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(batch.commit)
            with anyio.fail_after(SAFETY_LIMIT):
                await saving.wait()
            with pytest.raises(CommitOrderError, match="another commit of this partition") as error:
                await batch.commit()
            assert error.value.partition == 0
            go_on.set()
        await batch.commit()  # that the other one has done
        store.before_save = None
        assert await store.cursors() == {0: batch.cursor}


# ---------------------------------------------------------------------- R6


@pytest.mark.parametrize("last_cursor", ["closed", "never"])
@pytest.mark.parametrize("dialect", ["v2-draft", "v2-token"])
async def test_r06_a_closed_partition_is_drained_at_its_end_and_that_is_saved(
    serve: Callable[..., Publisher], store: RecordingStore, dialect: str, last_cursor: str
) -> None:
    publisher = serve(1, dialect=dialect, quirks=Quirks(last_cursor=last_cursor))  # type: ignore[arg-type]
    end = numbers(publisher, 0, range(5))
    publisher.close(0)
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == list(range(5))
        assert consumer.status()[0].state == "drained"
    assert await store.statuses() == {0: "drained"}
    assert await store.cursors() == {0: end}


async def test_r06_drained_by_last_cursor_is_saved_with_the_position_itself(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(1, dialect="v2-draft")
    end = numbers(publisher, 0, range(5))
    publisher.close(0)
    async with consume(publisher, store=store) as consumer:
        batch = await next_batch(consumer.batches())
        await batch.commit()
    assert stand(store.saves[-1]) == {0: (end, "drained")}


@pytest.mark.parametrize(("listed", "looks"), [("closed", 0), ("never", 1)])
async def test_r06_a_drained_partition_is_not_read_again(
    publisher: Publisher, store: RecordingStore, listed: Literal["closed", "never"], looks: int
) -> None:
    """Without a `lastCursor` a run without `follow` looks once whether more has come."""
    publisher.quirks = Quirks(last_cursor=listed)
    numbers(publisher, 0, range(5))
    publisher.close(0)
    async with consume(publisher, store=store, follow=False) as consumer:
        await read_n(consumer)
    publisher.clear_requests()
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == []
    assert publisher.counters["fetch"] == looks


@pytest.mark.parametrize(
    "quirks",
    [Quirks(), Quirks(keep_token=True), Quirks(last_cursor="closed")],
    ids=["token", "same token", "last cursor"],
)
async def test_r06_a_partition_that_closes_while_caught_up_is_asked_once_more(
    publisher: Publisher, store: RecordingStore, quirks: Quirks
) -> None:
    publisher.quirks = quirks
    numbers(publisher, 0, [0])
    async with consume(publisher, store=store) as consumer, anyio.create_task_group() as tasks:

        async def handle(batch: Batch) -> None:
            seen.extend(n_of(batch.events))

        seen: list[int] = []
        tasks.start_soon(consumer.run, handle)
        await wait_until(lambda: consumer.status()[0].state == "caught up")
        numbers(publisher, 0, [1])
        publisher.close(0)
        await wait_until(lambda: consumer.status()[0].state == "drained")
        tasks.cancel_scope.cancel()
    assert seen == [0, 1]


async def test_r06_an_empty_closed_partition_is_drained(
    publisher: Publisher, store: RecordingStore
) -> None:
    publisher.close(0)
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == []
        assert consumer.status()[0].state == "drained"


async def test_r06_empty_pages_whose_cursor_moves_are_not_the_end(publisher: Publisher) -> None:
    publisher.fail(faults.EmptyPage(), times=12)
    numbers(publisher, 0, [0])
    publisher.close(0)
    async with consume(publisher, follow=False) as consumer:
        assert await read_n(consumer) == [0]


@pytest.mark.parametrize("closed", [False, True])
async def test_r06_long_stretches_of_internal_events_are_progress(
    publisher: Publisher, closed: bool
) -> None:
    publisher.scan_limit = 10
    numbers(publisher, 0, [0])
    publisher.append_internal(0, 300)
    numbers(publisher, 0, [1])
    if closed:
        publisher.close(0)
    async with consume(publisher, follow=False, limit={"poll_interval": 0.001}) as consumer:
        assert await read_n(consumer) == [0, 1]


async def test_r06_many_empty_pages_in_a_row_are_reported_and_never_the_end(
    publisher: Publisher,
) -> None:
    publisher.fail(faults.EmptyPage(), times=None)
    publisher.close(0)
    async with (
        consume(publisher, follow=False, limit={"poll_interval": 0.001}) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(read_n, consumer)
        await wait_until(lambda: consumer.status().reports)
        assert "100 responses in a row" in consumer.status().reports[0]
        assert consumer.status()[0].state == "reading"
        publisher.heal()
    assert consumer.status()[0].state == "drained"


async def test_r06_a_reopened_partition_is_read_on(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, [0])
    publisher.close(0)
    async with consume(publisher, store=store, follow=False) as consumer:
        assert await read_n(consumer) == [0]
        publisher.reopen(0)
        numbers(publisher, 0, [1])
        assert await read_n(consumer) == [1]


# ---------------------------------------------------------------------- R7


async def test_r07_bootstrap_saves_every_position_in_one_save(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(20)
    async with consume(publisher, store=store):
        (saved,) = store.saves
        assert stand(saved) == dict.fromkeys(range(20), ("_first", "open"))


async def test_r07_start_last_delivers_only_events_published_after_the_start(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(2)
    fill(publisher, 10)
    async with consume(publisher, start="last") as consumer:
        numbers(publisher, 0, [100])
        assert n_of(await take(aiter(consumer))) == [100]


@pytest.mark.parametrize("quirks", [Quirks(), Quirks(last_cursor="always")])
@pytest.mark.parametrize("restart_at", ["first", "last"])
async def test_r07_start_last_and_a_crash_before_the_first_event_skip_nothing(
    serve: Callable[..., Publisher], store: RecordingStore, quirks: Quirks, restart_at: str
) -> None:
    publisher = serve(2, quirks=quirks)
    fill(publisher, 10)
    async with consume(publisher, start="last", store=store):
        pass
    assert "_last" not in (await store.cursors()).values()
    numbers(publisher, 1, [100])
    async with consume(publisher, start=restart_at, store=store, follow=False) as consumer:
        assert await read_n(consumer) == [100]


@pytest.mark.parametrize("status", [400, 404, 409, 410])
async def test_r07_r10_a_request_for_the_end_that_is_refused_for_a_while_is_no_error(
    publisher: Publisher, status: int
) -> None:
    fill(publisher, 10)
    publisher.fail(status, times=5, on="fetch")
    async with consume(publisher, start="last") as consumer:
        numbers(publisher, 0, [100])
        assert n_of(await take(aiter(consumer))) == [100]


async def test_r07_r10_a_request_for_the_end_that_is_refused_for_too_long_ends_the_entry(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 10)
    publisher.fail(404, times=None, on="fetch")
    retry = RetryPolicy(base_delay=0.002, max_delay=0.01, refused_for=0.1)
    with anyio.fail_after(SAFETY_LIMIT), pytest.raises(RequestRefusedError, match="404"):
        async with consume(publisher, start="last", store=store, retry=retry):
            pytest.fail("the entry should end")
    assert await store.positions() == {}


@pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
async def test_r07_a_split_between_discovery_and_the_request_for_the_end_is_no_error(
    publisher: Publisher, method: Any
) -> None:
    fill(publisher, 10)

    def split_now(response: Response, request: Request, publisher: Publisher) -> Response:
        publisher.split(0, method=method)
        return Response(409)

    publisher.fail(split_now)
    async with consume(publisher, start="last") as consumer:
        fill(publisher, 10, start=10)
        assert sorted(n_of(await take(aiter(consumer), 10))) == list(range(10, 20))


async def test_r07_start_last_drains_closed_partitions_from_the_outset(
    publisher: Publisher, store: RecordingStore
) -> None:
    fill(publisher, 10)
    publisher.split(0)
    fill(publisher, 10, start=10)
    async with consume(publisher, start="last", store=store) as consumer:
        assert (await store.statuses()) == {0: "drained", 1: "open", 2: "open"}
        assert consumer.status()[0].state == "drained"
        numbers(publisher, 1, [100])
        numbers(publisher, 2, [101])
        assert sorted(n_of(await take(aiter(consumer), 2))) == [100, 101]
    asked = {request.cursor for request in publisher.requests if request.partition == 0}
    assert asked <= {"_last", publisher.end_cursor(0)}


@pytest.mark.parametrize("start", ["first", "last"])
async def test_r07_a_partition_that_appears_later_is_read_from_its_first_event(
    publisher: Publisher, store: RecordingStore, start: str
) -> None:
    async with consume(publisher, start=start, store=store) as consumer:
        publisher.add(5)
        numbers(publisher, 5, [1, 2, 3])
        assert n_of(await take(aiter(consumer), 3)) == [1, 2, 3]


@pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
async def test_r07_after_start_last_the_children_of_a_later_split_are_read_from_their_first_event(
    publisher: Publisher, method: str
) -> None:
    fill(publisher, 10)
    async with consume(publisher, start="last") as consumer:
        fill(publisher, 5, start=10)
        publisher.split(0, method=method)  # type: ignore[arg-type]
        fill(publisher, 10, start=15)
        assert sorted(n_of(await take(aiter(consumer), 15))) == list(range(10, 25))


async def test_r07_a_partition_that_appears_while_the_consumer_is_down_is_not_skipped(
    publisher: Publisher, store: RecordingStore
) -> None:
    async with consume(publisher, start="last", store=store):
        pass
    publisher.add(5)
    numbers(publisher, 5, [1])
    async with consume(publisher, start="last", store=store, follow=False) as consumer:
        assert await read_n(consumer) == [1]


async def test_r07_an_empty_first_discovery_is_waited_out_and_does_not_use_up_the_start(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(2)
    numbers(publisher, 0, range(5))
    end = publisher.end_cursor(0)
    publisher.fail(faults.Replace(b'{"token":"t","partitions":null}'), times=3, on="discovery")
    async with consume(publisher, start="last", store=store) as consumer:
        events = aiter(consumer)
        async with nothing_comes(events):
            await wait_until(lambda: bool(store.saves))
        assert (await store.cursors())[0] == end
        numbers(publisher, 0, [5])
        assert n_of(await take(events)) == [5]
        assert any("lists no partition so far" in text for text in consumer.status().reports)


async def test_r07_where_the_ends_are_not_known_after_an_empty_discovery_the_iteration_ends(
    serve: Callable[..., Publisher],
) -> None:
    publisher = serve(1, dialect="v2-token")
    publisher.fail(faults.Replace(b'{"token":"t","partitions":[]}'), times=2, on="discovery")
    publisher.fail(faults.Replace(b'{"cursor":"_last"}\n'), times=None, on="fetch")
    async with consume(publisher, start="last") as consumer:
        with pytest.raises(NoProgressError, match="'feedapi cursors skip'"):
            await take(aiter(consumer))


@pytest.mark.parametrize("body", [b"", b'{"cursor":"_last"}\n'])
async def test_r07_a_feed_that_gives_no_cursor_for_last_is_an_error_that_names_the_way_out(
    serve: Callable[..., Publisher], store: RecordingStore, body: bytes
) -> None:
    publisher = serve(1, dialect="v2-token")
    publisher.fail(faults.Replace(body), times=None, on="fetch")
    with pytest.raises(NoProgressError, match="'feedapi cursors skip'"):
        async with consume(publisher, start="last", store=store):
            pass
    assert store.saves == []


async def test_r07_last_in_a_mapping_is_asked_for_and_never_stored(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(2, dialect="v2-token")
    numbers(publisher, 0, range(5))
    end = publisher.end_cursor(0)
    async with consume(publisher, start={0: "_last"}, store=store, follow=False) as consumer:
        assert await store.cursors() == {0: end, 1: "_first"}
        numbers(publisher, 0, [5])
        assert await read_n(consumer) == [5]


async def test_r07_a_start_mapping_gives_cursors_and_the_others_begin_at_the_first_event(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(3)
    middle = numbers(publisher, 0, [0, 1])
    numbers(publisher, 0, [2])
    numbers(publisher, 1, [10])
    async with consume(
        publisher, store=store, follow=False, start={0: middle, 2: "_last"}
    ) as consumer:
        numbers(publisher, 2, [20])
        assert len(store.saves) == 1
        assert sorted(await read_n(consumer)) == [2, 10, 20]


async def test_r07_a_start_mapping_applies_to_the_first_start_only(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, [0])
    async with consume(publisher, store=store, follow=False) as consumer:
        await read_n(consumer)
    async with consume(publisher, store=store, follow=False, start={0: "_first"}) as consumer:
        assert await read_n(consumer) == []


async def test_r07_a_start_mapping_may_name_the_ancestor_of_a_split(publisher: Publisher) -> None:
    fill(publisher, 10)
    cursor = publisher.end_cursor(0)
    publisher.split(0, method="cursor-from")
    fill(publisher, 10, start=10)
    async with consume(publisher, follow=False, start={0: cursor}) as consumer:
        assert sorted(await read_n(consumer)) == list(range(10, 20))


async def test_r07_a_start_mapping_that_names_an_unknown_partition_is_an_error(
    publisher: Publisher, store: RecordingStore
) -> None:
    with pytest.raises(LineageError, match="partition 7"):
        await consume(publisher, start={7: "_first"}, store=store).__aenter__()
    assert store.saves == []


async def test_r07_names_and_filters_have_positions_of_their_own(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    from feedapi_client import FetchOptions

    publisher = serve(1, dialect="v2-draft", filters=["entity"])
    numbers(publisher, 0, [0], entity="a")
    numbers(publisher, 0, [1], entity="b")
    for options, expected in [
        ({}, [0, 1]),
        ({"name": "other"}, [0, 1]),
        ({"fetch": FetchOptions(filters={"entity": "a"})}, [0]),
        ({"fetch": FetchOptions(filters={"entity": "b"})}, [1]),
        ({"fetch": FetchOptions(filters={"entity": "a"})}, []),
        ({}, []),
    ]:
        async with consume(
            publisher, store=store, follow=False, start="first", **options
        ) as consumer:
            assert await read_n(consumer) == expected


# ---------------------------------------------------------------------- R17


async def test_r17_the_second_save_is_refused_and_that_consumer_stops(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, [0])
    async with consume(publisher, store=store) as one, consume(publisher, store=store) as two:
        first, second = one.batches(), two.batches()
        winner, loser = await next_batch(first), await next_batch(second)
        await winner.commit()
        with pytest.raises(FencedError, match="default"):
            await loser.commit()
        numbers(publisher, 0, [1])
        assert n_of((await next_batch(first)).events) == [1]
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(FencedError):
            await anext(second)


async def test_r17_async_for_and_run_end_with_fenced_error(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, [0])

    async def handle(batch: Batch) -> None:
        await rival()

    async def rival() -> None:
        async with consume(publisher, store=store, follow=False) as other:
            await read_n(other)

    async with consume(publisher, store=store) as consumer:
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(FencedError):
            await consumer.run(handle)
    numbers(publisher, 0, [1])
    async with consume(publisher, store=store) as consumer:
        events = aiter(consumer)
        await take(events)
        await rival()
        with pytest.raises(FencedError):
            await take(events)


async def test_r17_of_two_consumers_that_bootstrap_at_once_one_is_fenced(
    publisher: Publisher, store: RecordingStore
) -> None:
    outcomes = []

    async def bootstrap() -> None:
        try:
            async with consume(publisher, store=store):
                outcomes.append("open")
        except FencedError:
            outcomes.append("fenced")

    async def both_have_loaded(_: Mapping[int, Position]) -> None:
        await wait_until(lambda: store.loads >= 2)

    store.before_save = both_have_loaded
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bootstrap)
        tasks.start_soon(bootstrap)
    assert sorted(outcomes) == ["fenced", "open"]


async def test_r17_of_two_live_consumers_each_event_is_committed_by_one(
    serve: Callable[..., Publisher], store: RecordingStore
) -> None:
    publisher = serve(2, page_size=5, checkpoint_every=5)
    fill(publisher, 60)
    applied: list[int] = []

    async def work() -> None:
        async with consume(publisher, store=store, limit=SMALL) as consumer:
            async for batch in consumer.batches():
                transaction = Transaction()
                await batch.commit(transaction)
                await store.commit(transaction)
                applied.extend(n_of(batch.events))

    async def until_fenced() -> None:
        while True:
            with pytest.raises(FencedError):
                await work()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(until_fenced)
        tasks.start_soon(until_fenced)
        await wait_until(lambda: len(applied) >= 60)
        tasks.cancel_scope.cancel()
    assert sorted(applied) == list(range(60))


async def test_r17_a_fenced_transfer_in_the_background_ends_the_iteration(
    publisher: Publisher, store: RecordingStore
) -> None:
    numbers(publisher, 0, [0])
    async with consume(publisher, store=store) as consumer:
        batches = consumer.batches()
        await (await next_batch(batches)).commit()
        async with nothing_comes(batches):  # asks for the next, so that the first batch counts
            await wait_until(lambda: consumer.status()[0].caught_up)
        key = consumer.key
        await store.replace(key, {0: Position("_first")})
        publisher.split(0, method="cursor-from")
        with anyio.fail_after(SAFETY_LIMIT), pytest.raises(FencedError):
            await anext(batches)
