"""Graceful restarts only: nothing is handled twice, also without any transaction."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from feedapi_client import FeedKey, Share
from feedapi_client.testing import Publisher
from tests.sharing.fleet import fleet, publish, until
from tests.sharing.in_memory import restart_in_memory

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


async def test_graceful_restarts_in_memory_repeat_nothing() -> None:
    outcome = await restart_in_memory(12, seed=1)
    assert outcome.exactly_once, outcome
    assert outcome.splits


@pytest.mark.parametrize("seconds", [10, 20])
async def test_leases_are_kept_while_a_commit_is_under_way(seconds: float) -> None:
    """A stop whose grace period is over gives nothing away that is about to be committed."""
    publisher = Publisher(1)
    publish(publisher, 0, *range(5))
    handled: list[int] = []
    async with fleet(publisher) as instances, anyio.create_task_group() as tasks:
        saves = instances.store.save

        async def save(*args: Any, **options: Any) -> None:
            if handled:
                await anyio.sleep(seconds)
            await saves(*args, **options)

        async def first() -> None:
            async with instances.consumer(share=Share(lease_seconds=15)) as consumer:
                async for batch in consumer.batches():
                    handled.extend(event.json()["n"] for event in batch)
                    consumer.stop(grace=0)
                    await batch.commit()

        instances.store.save = save  # type: ignore[method-assign]
        tasks.start_soon(first)
        await until(lambda: handled)
        second = instances.start(share=Share(lease_seconds=15))
        await until(lambda: second.reads)
        publish(publisher, 0, 5)
        await until(lambda: 5 in instances.handled)
        assert handled == list(range(5))
        assert instances.handled == [5]


async def test_r17_a_commit_that_ends_while_an_instance_leaves_hands_no_cursor_on() -> None:
    """Its lease is gone a moment later: whoever claims the partition transfers its cursor."""
    publisher = Publisher(1)
    publish(publisher, 0, *range(5))
    saved: list[set[int]] = []
    async with fleet(publisher) as instances:
        async with instances.consumer(share=Share(lease_seconds=15)) as consumer:
            save = instances.store.save

            async def slow(feed: FeedKey, positions: Any, **options: Any) -> None:
                saved.append(set(positions))
                if len(saved) == 1:
                    (first, _) = publisher.split(0, method="cursor-from")
                    await until(lambda: first in consumer.status().partitions)
                    consumer.stop(grace=0)
                    await anyio.sleep(5)
                await save(feed, positions, **options)

            instances.store.save = slow  # type: ignore[method-assign]
            async for batch in consumer.batches():
                await batch.commit()
        assert saved == [{0}]
