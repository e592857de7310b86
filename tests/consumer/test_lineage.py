"""R8 starts after, R9 cursor transfer, R10 rediscovery, R11 vanished partitions, R12 bad discovery,
R13 progress: as an application sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest

from feedapi_client import (
    AmbiguousLineageError,
    Batch,
    CursorRejectedError,
    FeedKey,
    LineageError,
    LostPartitionError,
    NegotiationError,
    NoProgressError,
    Position,
    ProtocolError,
)
from feedapi_client.testing import Quirks, faults
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    SHORT,
    LocalFeed,
    RecordingStore,
    last_fetch,
    n_of,
    read_n,
    wait_until,
)
from tests.consumer.script import Step, do, play
from tests.positions import stand

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

each_method = pytest.mark.parametrize("method", ["starts-after", "cursor-from"])
each_dialect = pytest.mark.parametrize("dialect", ["v2-draft", "v2-token"])
SMALL = {"max_batch_bytes": 1}
SELDOM = {"discovery_interval": 3600}

# ---------------------------------------------------------------------- splits, both methods


@each_method
@each_dialect
@pytest.mark.parametrize("read_before", [0, 7, 30])
async def test_r08_r09_a_split_while_the_consumer_is_down(
    dialect: Any, method: Any, read_before: int
) -> None:
    feed, seen = LocalFeed(dialect=dialect), []
    feed.fill(0, 30)
    async with feed.open(limit=SMALL) as reader:
        while len(seen) < read_before:
            batch = await reader.batch()
            await batch.commit()
            seen += batch.events
    _, second = feed.split(0, method=method)
    feed.fill(30, 40)
    feed.split(second, method=method)
    feed.fill(40, 50)
    feed.check(seen + await feed.read_events())


@each_method
@each_dialect
@pytest.mark.parametrize("committed", [True, False])
async def test_r08_r09_a_split_while_a_batch_is_in_flight(
    dialect: Any, method: Any, committed: bool
) -> None:
    feed = LocalFeed(dialect=dialect)
    feed.fill(0, 30)
    async with feed.open(limit=SMALL) as reader:
        in_flight = await reader.batch()
        seen = [*in_flight.events] if committed else []
        feed.split(0, method=method)
        feed.fill(30, 40)
        await wait_until(lambda: 2 in reader.consumer.status().partitions)
        if committed:
            await in_flight.commit()
        elif method == "starts-after":
            return
        while len(seen) < 40:
            batch = await reader.batch()
            await batch.commit()
            seen += batch.events
    feed.check(seen)


async def test_r09_a_slow_handler_delays_no_split_of_another_partition() -> None:
    feed, seen, stuck = LocalFeed(2), [], anyio.Event()
    feed.numbers(0, 0)

    async def handle(batch: Batch) -> None:
        if batch.partition == 0 and batch.events:
            stuck.set()
            await anyio.sleep_forever()
        seen.extend(n_of(batch.events))

    async with feed.running(handle):
        await stuck.wait()
        feed.split(0, method="cursor-from")
        (successor,) = feed.split(1, 1, method="cursor-from")
        feed.numbers(successor, 7)
        await wait_until(lambda: seen == [7])


async def test_r09_a_superseded_partition_delivers_nothing_while_its_transfer_waits() -> None:
    feed = LocalFeed(3, page_size=2, checkpoint_every=2)
    feed.numbers(0, *range(100, 140))
    feed.numbers(1, 1)
    feed.numbers(2, 2)
    seen: list[int] = []
    async with feed.open(limit=SMALL) as reader, anyio.create_task_group() as tasks:
        batch = None
        # Until partition 1 is released, and a batch of partition 2 is in flight.
        while batch is None or not {1, 2} <= set(seen) or batch.partition != 2:
            if set(seen) >= {1, 2}:
                feed.numbers(2, len(seen))
            batch = await reader.batch()
            await batch.commit()
            seen += n_of(batch.events)
        await wait_until(lambda: reader.consumer.status().buffered_bytes > 0)
        gate = feed.store.hold(lambda saved: 1 in saved)
        feed.close(1)
        with anyio.fail_after(SAFETY_LIMIT):
            await gate.reached.wait()
        first, _ = feed.split(0, method="cursor-from")
        await wait_until(lambda: first in reader.consumer.status().partitions)
        assert reader.state() == "reading"  # what is not saved is not shown
        tasks.start_soon(gate.open_when_all_wait)
        while (batch := await reader.batch()).partition == 2:
            await batch.commit()
        assert batch.partition in (3, 4)


# ---------------------------------------------------------------------- R8

LOST_5 = LostPartitionError, "partition 5"
ADD_5 = do.add(5, starts_after=4)
OPEN_PARENT = do.numbers(0, 0), do.add(1, starts_after=0), do.numbers(1, 1)
STARTS_AFTER: dict[str, list[Step]] = {
    "a child of an open parent waits, with one warning": [
        *(*OPEN_PARENT, do.open(), do.takes(0), do.rediscovered(4), do.waits(1, 0)),
        *(do.reported("partition 1", "open"), do.close(0), do.takes(1)),
    ],
    "without follow it does not hang": [*OPEN_PARENT, do.reads(0)],
    "a parent neither listed nor stored is history at the first start": [
        *(ADD_5, do.numbers(5, 5), do.reads(5)),
    ],
    "and after a restart": [ADD_5, do.enter(), do.numbers(5, 5), do.reads(5)],
    "later it is lost, if that is seen on entry": [
        *(do.enter(), ADD_5, do.raises(*LOST_5, do.enter(), partition=5), do.unasked(5)),
    ],
    "later it is lost, if that is seen while the consumer runs": [
        *(do.open(), ADD_5, do.raises(*LOST_5, do.takes(5), partition=5), do.unasked(5)),
    ],
    "a parent that was drained may leave the list": [
        *(do.numbers(0, 0), do.split(0, 1), do.reads(0)),
        *(do.remove(0), do.numbers(1, 1), do.reads(1)),
    ],
    "a late grandchild of a drained parent starts at its first event": [
        *(do.split(0, 1), do.open(), do.knows(1)),
        *(do.add(7, starts_after=0), do.numbers(7, 7), do.takes(7)),
    ],
}


@pytest.mark.parametrize("steps", STARTS_AFTER.values(), ids=STARTS_AFTER)
async def test_r08_a_child_starts_after_its_parent(steps: list[Step]) -> None:
    await play(*steps)


SPELLINGS = [Quirks(integer_lineage=True, integer_ids=True), Quirks(old_lineage_names=True)]


@pytest.mark.parametrize("quirks", SPELLINGS, ids=["integers", "old names"])
@each_method
async def test_r08_r09_lineage_is_read_in_each_spelling_of_publishers(
    quirks: Quirks, method: Any
) -> None:
    feed = LocalFeed(quirks=quirks, page_size=4, checkpoint_every=2)
    feed.fill(0, 20)
    feed.split(0, method=method)
    feed.fill(20, 40)
    feed.check(await feed.read_events())


# ---------------------------------------------------------------------- R9


def split(partition: int = 0, count: int = 2) -> Step:
    return do.split(partition, count, method="cursor-from")


ADD_5 = do.add(5, cursor_from=[3, 4])
READ_0 = do.numbers(0, 0), do.reads(0)
AMBIGUOUS = AmbiguousLineageError, "partition 2"
TWO_CURSORS = do.add(1), do.numbers(0, 0), do.numbers(1, 1), do.reads_all(0, 1)
LOSE = do.remove(0), do.add(5, cursor_from=[3])
TRANSFERS: dict[str, list[Step]] = {
    "a crash right after the transfer loses nothing": [
        *(do.fill(0, 10), do.reads(*range(10)), split(), do.enter(), do.fill(10, 20)),
        *(do.reads_all(*range(10, 20)), do.reads()),
    ],
    "the nearest ancestor with a position counts": [
        *(do.fill(0, 10), do.reads(*range(10)), split(), do.fill(10, 20)),
        *(do.reads_all(*range(10, 20)), split(1), do.fill(20, 30), do.reads_all(*range(20, 30))),
    ],
    "a successor that is listed late gets the same cursor": [
        *(*READ_0, do.remove(0), do.add(1, cursor_from=[0]), do.enter()),
        *(do.add(2, cursor_from=[0]), do.enter(), do.at_one_cursor(0, 1, 2)),
    ],
    "ancestors at different cursors are ambiguous on entry": [
        *(*TWO_CURSORS, do.merge([0, 1]), do.raises(*AMBIGUOUS, do.enter())),
        do.stored({0: "open", 1: "open"}),
    ],
    "ancestors at different cursors are ambiguous while the consumer runs": [
        *(*TWO_CURSORS, do.open(), do.merge([0, 1]), do.raises(*AMBIGUOUS, do.takes(2))),
        do.stored({0: "open", 1: "open"}),
    ],
    "a merge with one live ancestor takes its cursor": [
        *(do.fill(0, 10), do.reads(*range(10)), split(), do.merge([1, 2]), do.fill(10, 20)),
        do.reads(*range(10, 20)),
    ],
    "without an ancestor's position it begins at the first event, which is reported": [
        *(do.enter(), ADD_5, do.numbers(5, 5), do.open(follow=False), do.ends(5)),
        *(do.reported("partition 5: begins at its first event"), do.reports(1)),
    ],
    "history of a lost partition is not read again on entry": [
        *(*READ_0, *LOSE, do.open(), do.raises(*LOST_5, do.takes(5)), do.unasked(5)),
    ],
    "history of a lost partition is not read again while the consumer runs": [
        *(*READ_0, do.open(), *LOSE, do.raises(*LOST_5, do.takes(5)), do.unasked(5)),
    ],
    "an ancestor that stays listed is superseded and asked no more": [
        *(*READ_0, do.add(1, cursor_from=[0]), do.clear_requests(), do.open(follow=False)),
        *(do.ends(), do.state(0, "superseded"), do.stored({0: "superseded", 1: "open"})),
        do.unasked(0),
    ],
}


@pytest.mark.parametrize("steps", TRANSFERS.values(), ids=TRANSFERS)
async def test_r09_a_successor_takes_the_cursor_of_its_ancestor(steps: list[Step]) -> None:
    await play(*steps)


async def test_r09_children_and_the_superseded_ancestor_are_saved_in_one_save() -> None:
    feed = LocalFeed()
    cursor = feed.numbers(0, 0)
    await feed.read()
    feed.split(0, 3, method="cursor-from")
    feed.store.saves.clear()
    await feed.enter()
    assert [stand(positions) for positions in feed.store.saves] == [
        {0: (cursor, "superseded"), **dict.fromkeys((1, 2, 3), (cursor, "open"))}
    ]


class CancellingStore(RecordingStore):
    """Cancels the caller of the next save, which goes through."""

    scope: anyio.CancelScope | None = None

    async def save(self, feed: FeedKey, positions: Mapping[int, Position], **more: Any) -> None:
        await super().save(feed, positions, **more)
        if self.scope is not None:
            self.scope.cancel()


@pytest.mark.parametrize("iterated", [False, True], ids=["entry", "second-iteration"])
async def test_r09_a_report_survives_that_its_entry_is_cancelled_after_the_save(
    iterated: bool,
) -> None:
    feed = LocalFeed(store=(store := CancellingStore()))
    consumer = feed.consume(follow=False)
    if not iterated:
        await feed.enter()
    async with AsyncExitStack() as block:
        if iterated:
            await block.enter_async_context(consumer)
            await read_n(consumer)
        feed.add(5, cursor_from=[3, 4])
        with anyio.CancelScope() as store.scope:
            if iterated:
                await read_n(consumer)
            else:
                async with consumer:
                    await anyio.lowlevel.checkpoint()
        assert store.scope.cancelled_caught
        store.scope = None
        assert (await store.positions())[5].cursor == "_first"
        feed.numbers(5, 5)
        shown = {*consumer.status().reports}  # where the cancellation came after the opening
        if not iterated:
            await block.enter_async_context(consumer)
        assert await read_n(consumer) == [5]
        (report,) = shown | {*consumer.status().reports}
        assert "partition 5: begins at its first event" in report
        await read_n(consumer)
        assert consumer.status().reports == ()  # of another iteration


async def test_r09_a_superseded_partition_has_no_error_of_requests_before() -> None:
    feed = LocalFeed()
    feed.numbers(0, 0)
    async with feed.running() as reader:
        await reader.until("caught up")
        feed.fail(503, on="fetch", times=None)
        await wait_until(lambda: reader.consumer.status()[0].error is not None)
        feed.split(0, into=(1,), method="cursor-from")
        await reader.until("superseded")
        status = reader.consumer.status()[0]
        assert (status.error, status.since, status.retry_at) == (None, None, None)
        assert status.fetch_failures > 0


async def test_r09_at_the_first_start_the_successors_hold_the_whole_history() -> None:
    feed = LocalFeed()
    feed.fill(0, 20)
    feed.split(0, method="cursor-from")
    feed.fill(20, 40)
    feed.check(await feed.read_events())


# ---------------------------------------------------------------------- R10


async def test_r10_a_409_leads_to_a_discovery_and_the_new_token() -> None:
    feed = LocalFeed(30)
    async with feed.open(limit=SELDOM) as reader:
        for n in range(5):
            token = feed.rotate_token()
            for partition in range(30):
                feed.numbers(partition, 100 * n + partition)
            assert sorted(await reader.take(30)) == [*range(100 * n, 100 * n + 30)]
            assert last_fetch(feed).token == token
    assert feed.counters["discovery"] <= 12


REFUSALS: dict[str, list[Step]] = {
    **{
        f"{status} that passes loses and repeats nothing": [
            *(do.numbers(0, 0), do.fail(status, times=times), do.reads(0)),
        ]
        for status, times in ((409, 4), (400, 1), (404, 1), (410, 1))
    },
    **{
        f"{status} at the first cursor is never the cursor's fault": [
            *(do.fail(status, times=None), do.open(retry=SHORT)),
            do.raises(ProtocolError, f"{status}.*_first", do.takes(0)),
        ]
        for status in (400, 404, 410)
    },
    "409 that persists with a fresh token is an error": [
        *(do.fail(409, times=None), do.open(retry=SHORT)),
        do.raises(
            *(ProtocolError, "409.*while discovery lists the partition", do.takes(0)), partition=0
        ),
        *(do.discoveries(2, 1000), do.fetches(2, 1000)),
    ],
    "a drained partition leads to a discovery": [
        *(do.numbers(0, 0), do.close(0), do.open(limit=SELDOM), do.takes(0)),
        *(do.set(quirks=Quirks(keep_token=True)), do.add(1, starts_after=0), do.numbers(1, 1)),
        do.takes(1),
    ],
    "discovery is repeated at its interval": [
        do.open(limit={"discovery_interval": 0.02}),
        do.nothing_until(lambda play: play.feed.counters["discovery"] >= 6),
    ],
    "a v1 partition count that is wrong is an error": [
        *(do.begin_with(4, dialect="v1"), do.open(v1_partitions=2, retry=SHORT)),
        do.raises(ProtocolError, "partition count is 4", do.takes(0)),
    ],
    "a discovery that something needs and that stays no feed is an error": [
        *(do.open(retry=SHORT), do.fail(faults.Html(), on="discovery", times=None)),
        *(do.rotate_token(), do.raises(NegotiationError, "feed", do.takes(0))),
    ],
}


@pytest.mark.parametrize("steps", REFUSALS.values(), ids=REFUSALS)
async def test_r10_refusals_lead_to_a_discovery_and_pass_or_end(steps: list[Step]) -> None:
    await play(*steps)


@pytest.mark.parametrize("status", [400, 404, 410])
async def test_r10_a_listed_partition_that_refuses_its_cursor_for_long_is_cursor_rejected(
    status: int,
) -> None:
    feed = LocalFeed()
    async with feed.open(retry=SHORT) as reader:
        cursor = feed.numbers(0, 0)
        await reader.take()
        feed.fail(status, times=None)
        with pytest.raises(CursorRejectedError, match=str(status)) as caught:
            await reader.take()
    assert caught.value.partition == 0
    said, ours = caught.value.message.split("It has done so")
    assert said.startswith("the publisher answers"), "the publisher's words come first"
    assert cursor in ours


@pytest.mark.parametrize("seconds_between", [0.001, 3600])
async def test_r10_an_unknown_command_leads_to_a_discovery_at_a_limited_rate(
    monkeypatch: pytest.MonkeyPatch, seconds_between: float
) -> None:
    gap = "feedapi_client.runtime.topology.UNKNOWN_COMMAND_GAP_SECONDS"
    monkeypatch.setattr(gap, seconds_between)
    feed = LocalFeed()
    feed.fail(faults.UnknownCommands(), times=None)
    async with feed.open(limit={**SELDOM, "max_poll_interval": 0.005}) as reader:
        await reader.nothing_until(lambda: feed.counters["fetch"] >= 20)
        if seconds_between < 1:
            await reader.nothing_until(lambda: feed.counters["discovery"] >= 3)
        else:
            assert feed.counters["discovery"] == 1


# ---------------------------------------------------------------------- R11

VANISHED: dict[str, list[Step]] = {
    "it keeps its position, stops, and is reported": [
        *(do.add(1), do.numbers(0, 0), do.open(), do.takes(0), do.numbers(1, 1), do.takes(1)),
        *(do.keep_cursors(), do.remove(0), do.reported("partition 0", "no longer listed")),
        *(do.state(0, "vanished"), do.numbers(1, 2), do.takes(2)),
        *(do.stored({0: "open", 1: "open"}), do.still_at_cursor(0)),
    ],
    "one that comes back is read on": [
        *(do.numbers(0, 0), do.open(), do.delivers("first", 0), do.commits("first"), do.at_end()),
        *(do.remove(0), do.state(0, "vanished"), do.add(0), do.numbers(0, 1)),
        do.delivers("second", 1),
    ],
    "a child whose undrained parent vanishes is lost": [
        *(do.numbers(0, 0), do.split(0, 1), do.fail(503, partition=0, times=None), do.open()),
        *(do.remove(0), do.raises(LostPartitionError, "partition 1", do.takes(0))),
    ],
    "without follow a feed whose partitions vanished ends": [
        *(do.numbers(0, 0), do.enter(), do.remove(0), do.reads()),
    ],
}


@pytest.mark.parametrize("steps", VANISHED.values(), ids=VANISHED)
async def test_r11_a_partition_that_is_no_longer_listed(steps: list[Step]) -> None:
    await play(*steps)


# ---------------------------------------------------------------------- R12

BAD_PARTITIONS: dict[str, Any] = {
    "duplicate id": [{"id": "0"}, {"id": "0"}],
    "id too large": [{"id": "32768"}],
    "negative id": [{"id": "-1"}],
    "fractional id": [{"id": 1.5}],
    "no id": [{}],
    "cycle": [{"id": "0", "startsAfterPartition": "1"}, {"id": "1", "startsAfterPartition": "0"}],
    "cycle of both methods": [
        {"id": "0", "startsAfterPartition": "1"},
        {"id": "1", "cursorFromPartitions": ["0"]},
    ],
    "self-parent": [{"id": "0", "startsAfterPartition": "0"}],
    "own ancestor": [{"id": "0", "cursorFromPartitions": ["0"]}],
    "both mechanisms": [
        {"id": "0"},
        {"id": "1", "startsAfterPartition": "0", "cursorFromPartitions": ["0"]},
    ],
    "not an object": ["0"],
    "closed is no boolean": [{"id": "0", "closed": "yes"}],
}


def lists(partitions: list[Any]) -> faults.Fault:
    return faults.Edit(lambda found: found | {"partitions": partitions})


@pytest.mark.parametrize("partitions", BAD_PARTITIONS.values(), ids=BAD_PARTITIONS)
async def test_r12_bad_discovery_is_an_error_on_entry(partitions: list[Any]) -> None:
    feed = LocalFeed()
    feed.fail(lists(partitions), on="discovery", times=None)
    with pytest.raises((LineageError, ProtocolError), match="partition"):
        await feed.enter()
    assert feed.store.saves == []


FAILED_DISCOVERIES = {
    **{name: lists(partitions) for name, partitions in BAD_PARTITIONS.items()},
    "html": faults.Html(),
    **{str(status): faults.Status(status) for status in (404, 401, 500)},
    "a list": faults.Replace([]),
}


@pytest.mark.parametrize("fault", FAILED_DISCOVERIES.values(), ids=FAILED_DISCOVERIES)
async def test_r12_a_running_consumer_keeps_its_last_good_topology_reports_and_tries_again(
    fault: faults.Fault,
) -> None:
    await play(
        *(do.open(limit={"discovery_interval": 0.01}), do.numbers(0, 0), do.takes(0)),
        *(do.fail(fault, on="discovery", times=None), do.rediscovered(4)),
        *(do.reported("last good topology"), do.numbers(0, 1), do.takes(1)),
        *(do.heal(), do.split(0), do.numbers(1, 2), do.takes(2)),
    )


# ---------------------------------------------------------------------- R13


@pytest.mark.parametrize("fault", [faults.NoCheckpoint(), faults.SameCheckpoint()], ids=repr)
@pytest.mark.parametrize("times", [3, None])
async def test_r13_events_without_a_new_cursor_are_retried_and_then_no_progress(
    fault: faults.Fault, times: int | None
) -> None:
    """A publisher that recovers in time repeats nothing."""
    feed = LocalFeed()
    feed.numbers(0, *range(20))
    feed.fail(fault, times=times)
    if times is not None:
        assert await feed.read() == [*range(20)]
        return
    with pytest.raises(NoProgressError, match="partition 0"):
        await feed.read()
    assert 2 <= feed.counters["fetch"] <= 10


async def test_r13_after_an_empty_response_of_an_open_partition_the_next_poll_waits() -> None:
    feed = LocalFeed()
    feed.fail(faults.Empty(), times=None)
    async with feed.open(limit={"poll_interval": 3600}) as reader:
        await reader.nothing_until(lambda: feed.counters["discovery"] >= 6)
    assert feed.counters["fetch"] == 1
