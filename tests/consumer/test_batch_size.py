"""How large batches are: `Limits.max_batch_events`. On virtual time."""

from __future__ import annotations

import anyio
import pytest

from feedapi_client import Batch, FeedConsumer, Limits
from tests.consumer.helpers import LocalFeed, n_of
from tests.testing.virtual_time import HOUR, asgi_client

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]


async def read(
    events: int, most: int, *, page: int, every: int = 1, count: int | None = None
) -> tuple[list[Batch], list[float]]:
    """Read so many batches of one partition, or to the end. Return them, and when they came."""
    feed = LocalFeed(page_size=page, checkpoint_every=every)
    feed.numbers(0, *range(events))
    limits = Limits(max_batch_events=most)
    http = asgi_client(feed)
    batches: list[Batch] = []
    times: list[float] = []
    consumer = FeedConsumer("http://feed/feed", http=http, limits=limits, follow=count is not None)
    async with http, consumer:
        began = anyio.current_time()
        async for batch in consumer.batches():
            batches.append(batch)
            times.append(anyio.current_time() - began)
            await batch.commit()
            if len(batches) == count:
                break
    return batches, times


@pytest.mark.parametrize("most", [1, 7, 100, 5000])
async def test_r03_batches_of_a_page_are_made_up_to_a_number_of_events(most: int) -> None:
    batches, _ = await read(1000, most, page=1000)
    assert [n for batch in batches for n in n_of(batch.events)] == [*range(1000)]
    sizes = [len(batch) for batch in batches]
    assert max(sizes) <= most
    # Parts of an eighth are joined, so that only the last one may be much smaller.
    assert all(size >= most * 7 // 8 for size in sizes[:-1])


async def test_r03_a_batch_holds_what_one_checkpoint_closes() -> None:
    batches, _ = await read(100, 10, page=50, every=50)
    assert [len(batch) for batch in batches] == [50, 50]


async def test_a_batch_that_could_have_more_events_is_delivered_at_once() -> None:
    with anyio.fail_after(HOUR):
        _, times = await read(50, 100, page=10, count=1)
    assert times == [0.0]


def test_it_is_optional_and_positive() -> None:
    assert Limits().max_batch_events is None
    with pytest.raises(ValueError, match="must be positive"):
        Limits(max_batch_events=0)
