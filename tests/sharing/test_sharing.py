"""Several consumers of one feed: they divide it, and every event is handled once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from feedapi_client import (
    Batch,
    FeedConsumer,
    FencedError,
    LeaseLostError,
    Limits,
    MemoryCursorStore,
    PartitionState,
    Share,
    SQLiteCursorStore,
)
from feedapi_client.testing import Publisher
from tests.sharing.fleet import BRIEF, PAGES, URL, Gate, fleet, until

pytestmark = pytest.mark.anyio
VIRTUAL = pytest.mark.virtual_time


@pytest.mark.parametrize("where", [pytest.param("memory", marks=VIRTUAL), "file"])
async def test_who_joins_and_leaves_repeats_nothing(where: str, tmp_path: Path) -> None:
    async with fleet(Publisher(6, **PAGES)) as instances:
        options: dict[str, Any] = {}
        if where == "file":
            instances.store = SQLiteCursorStore(tmp_path / "cursors.db")
            quick = Limits(poll_interval=0.005, max_poll_interval=0.02)
            options = {"share": Share(rebalance_seconds=0.05), "limits": quick}
        members = []
        for _ in range(3):
            instances.publish(100)
            members.append(instances.start(**options))
            kept = members[0].reads
            await instances.balanced(*members)
            assert not kept or members[0].reads < kept
        await instances.stop(members.pop(0))
        instances.publish(100)
        await instances.balanced(*members)
        await instances.done()
        for member in members:
            await instances.stop(member)
        await instances.store.aclose()


@VIRTUAL
async def test_a_hand_over_waits_for_the_batch_in_flight() -> None:
    async with fleet(Publisher(2, **PAGES)) as instances:
        instances.publish(20)
        instances.before = gate = Gate()
        first = instances.start()
        await gate.reached.wait()
        await instances.balanced(first)
        second = instances.start()
        # It is known to the first one, which gives a partition away and waits for its batch.
        await until(lambda: PartitionState.ELSEWHERE in _states(first))
        assert (first.reads, second.reads) == ({0, 1}, set())
        gate.open.set()
        await instances.balanced(first, second)
        await instances.done()


def _states(member: Any) -> set[PartitionState]:
    return {p.state for p in member.consumer.status().partitions.values()}


@VIRTUAL
async def test_a_hand_over_waits_no_longer_than_its_time() -> None:
    begun, never, lost = set[int](), anyio.Event(), list[int | None]()

    async def handle(batch: Batch) -> None:
        begun.add(batch.partition)
        await never.wait()
        try:
            await batch.commit()
        except LeaseLostError as error:
            lost.append(error.partition)
            raise

    async with fleet(Publisher(2, **PAGES)) as instances:
        instances.publish(20)
        share = Share(lease_seconds=60, handover_seconds=1)
        stuck = instances.start(handle, share=share)
        await until(lambda: begun == {0, 1})  # what is given away was begun, whichever it is
        other = instances.start(share=share)
        await until(lambda: len(other.reads) == 1)
        taken = list(other.reads)
        await until(lambda: [*{p for p, _ in instances.effects}] == taken)
        never.set()
        await until(lambda: lost)
        assert lost == taken
        await instances.stop(stuck)  # its iteration went on


@VIRTUAL
async def test_without_share_a_second_consumer_is_fenced_and_sharers_go_on() -> None:
    async with fleet(Publisher(2, **PAGES)) as instances:
        await instances.balanced(instances.start())
        async with instances.consumer(share=None) as old:
            batches = old.batches()
            instances.publish(20)
            batch = await anext(batches)
            await instances.done()
            with pytest.raises(FencedError) as caught:
                await batch.commit()
            assert type(caught.value) is FencedError
        instances.publish(20)
        await instances.done()


@VIRTUAL
async def test_from_without_share_to_with_it_and_back() -> None:
    async with fleet(Publisher(4, **PAGES)) as instances:
        for share, count in ((None, 1), (Share(), 3), (None, 1)):
            instances.publish(50)
            running = [instances.start(share=share) for _ in range(count)]
            await instances.done()
            for one in running:
                await instances.stop(one)


@VIRTUAL
@pytest.mark.parametrize("way", ["batches", "events"])
async def test_r17_a_lost_lease_is_told_and_the_iteration_goes_on(way: str) -> None:
    """Another instance advances the partition, as one does that claimed it after a pause."""
    got = 0
    publisher = Publisher(1, page_size=5, checkpoint_every=5)
    async with fleet(publisher) as instances, instances.consumer() as consumer:
        instances.publish(5)

        async def advance() -> None:
            position = (await instances.store.load(consumer.key))[0]
            end = position.advance(publisher.end_cursor(0))
            await instances.store.save(consumer.key, {0: end})
            instances.publish(5)

        if way == "events":
            async for _ in consumer:
                got += 1
                if got == 5:
                    await advance()
                if got == 10:
                    return
        async for batch in consumer.batches():
            got += len(batch.events)
            if got == 5:
                await advance()
                with pytest.raises(LeaseLostError, match="partition 0: the lease"):
                    await batch.commit()
            else:
                await batch.commit()
            if got == 10:
                break


# R5: who goes on after a lease was lost is told of batches that were not committed


@VIRTUAL
@pytest.mark.parametrize("told", [False, True], ids=["by the next commit", "by its own"])
async def test_r05_the_first_commit_after_a_batch_was_lost_is_refused_once(told: bool) -> None:
    """An application may commit the effects of several batches with the last one's cursor."""
    async with fleet(Publisher(1, **PAGES)) as instances:
        instances.publish(5)
        cut = instances.cut()
        async with instances.consumer(share=BRIEF, store=cut) as consumer:
            batches = consumer.batches()
            lost = await anext(batches)
            cut.fail()
            other = instances.start(share=BRIEF)
            await instances.done()
            if told:
                with pytest.raises(LeaseLostError):
                    await lost.commit()
            await instances.stop(other)
            cut.heal()
            instances.publish(5)
            batch = await anext(batches)
            assert len(batch.events) == 5
            if not told:
                with pytest.raises(LeaseLostError, match="delivered again") as refused:
                    await batch.commit()
                assert refused.value.partition == 0
                # It was told, and goes on: what is stored is delivered again.
                batch = await anext(batches)
            await batch.commit()
            instances.effects += [(0, event.json()) for event in batch.events]
        await instances.done()


@VIRTUAL
async def test_r05_what_was_committed_is_not_lost() -> None:
    """The lease of a partition whose batches are all committed may come and go."""
    async with fleet(Publisher(1, **PAGES)) as instances:
        cut = instances.cut()
        async with instances.consumer(share=BRIEF, store=cut) as consumer:
            batches = consumer.batches()
            for _ in range(2):
                instances.publish(5)
                batch = await anext(batches)
                await batch.commit()
                instances.effects += [(0, event.json()) for event in batch.events]
                cut.fail()
                await until(lambda: consumer.status().partitions[0].owner is None)
                cut.heal()
        await instances.done()


def not_async(partitions: frozenset[int]) -> None: ...


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lease_seconds": 10.0}, "Share"),
        ({"lease_seconds": 0.0}, "Share"),
        ({"rebalance_seconds": -1.0}, "Share"),
        ({"handover_seconds": -1.0}, "Share"),
        ({"instance": ""}, "Share"),
        ({"instance": "a" + chr(10)}, "Share"),
        ({"on_assigned": not_async}, "on_assigned must be an async function"),
        ({"on_release": "release"}, "on_release"),
        ({"leases": object()}, "object does not implement LeaseStore"),
    ],
)
async def test_what_can_not_work_is_refused_at_once(options: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        FeedConsumer(URL, store=MemoryCursorStore(), share=Share(**options))
