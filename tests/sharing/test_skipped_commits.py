"""Batches that were not committed and whose lease was lost: whoever goes on is told (R5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from feedapi_client import Batch, LeaseLostError, MemoryCursorStore, Share
from feedapi_client.testing import Publisher
from tests.consumer.helpers import consume
from tests.sharing.helpers import Numbers, group, until
from tests.sharing.test_outages import BRIEF, Cut

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]
Serve = Callable[..., Publisher]


class Grouped:
    """An application that commits the effects of several batches with the last one's cursor."""

    def __init__(self) -> None:
        self.effects: Counter[str] = Counter()
        self._open: list[Any] = []

    def handle(self, batch: Batch) -> None:
        """Write effects in the open transaction."""
        self._open += [event.json() for event in batch.events]

    async def commit(self, batch: Batch) -> None:
        """Commit what is open with the cursor of this batch, or roll all of it back."""
        try:
            await batch.commit()
            self.effects.update(map(str, self._open))
        finally:
            self._open.clear()


async def test_r05_the_first_commit_after_a_batch_was_lost_is_refused(serve: Serve) -> None:
    publisher = serve(1, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(5)
    store = MemoryCursorStore()
    cut = Cut(store)
    application = Grouped()
    async with (
        group(publisher, store) as instances,
        consume(publisher, store=cut, name="shared", share=BRIEF) as consumer,
    ):
        batches = consumer.batches()
        application.handle(await batches.__anext__())
        cut.leases_fail = True
        other = instances.start(share=BRIEF)
        await until(lambda: instances.handled.total() >= 5)
        await instances.stop(other)
        cut.leases_fail = False
        numbers.publish(5)
        batch = await batches.__anext__()
        assert [event.json()["n"] for event in batch.events] == [0] * 5
        application.handle(batch)
        with pytest.raises(LeaseLostError, match="delivered again") as refused:
            await application.commit(batch)
        assert refused.value.partition == 0
        # It was told, and goes on: what is stored is delivered again, and can be committed.
        while (instances.handled + application.effects).total() < numbers.published.total():
            batch = await batches.__anext__()
            application.handle(batch)
            await application.commit(batch)
    assert instances.handled + application.effects == numbers.expected


async def test_r05_a_refused_commit_says_it_once(serve: Serve) -> None:
    publisher = serve(1, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(5)
    store = MemoryCursorStore()
    cut = Cut(store)
    async with (
        group(publisher, store) as instances,
        consume(publisher, store=cut, name="shared", share=BRIEF) as consumer,
    ):
        batches = consumer.batches()
        lost = await batches.__anext__()
        cut.leases_fail = True
        other = instances.start(share=BRIEF)
        await until(lambda: instances.handled.total() >= 5)
        with pytest.raises(LeaseLostError):
            await lost.commit()
        await instances.stop(other)
        cut.leases_fail = False
        numbers.publish(5)
        batch = await batches.__anext__()
        await batch.commit()
        assert len(batch.events) == 5


async def test_r05_what_was_committed_is_not_lost(serve: Serve) -> None:
    """The lease of a partition whose batches are all committed may come and go."""
    publisher = serve(1, page_size=10, checkpoint_every=5)
    numbers = Numbers(publisher)
    numbers.publish(5)
    cut = Cut(MemoryCursorStore())
    share = Share(lease_seconds=0.3, rebalance_seconds=0.02)
    async with consume(publisher, store=cut, name="shared", share=share) as consumer:
        batches = consumer.batches()
        await (await batches.__anext__()).commit()
        cut.leases_fail = True
        await until(lambda: consumer.status().partitions[0].owner is None)
        cut.leases_fail = False
        numbers.publish(5)
        batch = await batches.__anext__()
        await batch.commit()
        assert [event.json()["n"] for event in batch.events] == [0] * 5
