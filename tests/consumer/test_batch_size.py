"""How large batches are: `Limits.max_batch_events`. On virtual time."""

from __future__ import annotations

import math

import anyio
import httpx
import pytest

from feedapi_client import Batch, FeedConsumer, Limits
from feedapi_client.testing import Publisher
from tests.consumer.test_watchdog import BACKENDS, HangingTransport
from tests.testing.virtual_time import HOUR, run_in_virtual_time


class Setting:
    """A consumer of one partition, and the batches that came, with their times."""

    def __init__(self, events: int, *, page_size: int, limits: Limits, follow: bool) -> None:
        self.publisher = Publisher(1, page_size=page_size, checkpoint_every=1)
        self.publisher.extend(0, [{"n": n} for n in range(events)])
        self.transport = HangingTransport(self.publisher)
        self.http = httpx.AsyncClient(
            transport=self.transport, base_url="http://feed", timeout=None
        )
        self.consumer = FeedConsumer(
            "http://feed/feed", http=self.http, limits=limits, follow=follow
        )
        self.batches: list[Batch] = []
        self.times: list[float] = []

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]

    async def read(self, batches: float = math.inf) -> None:
        """Read so many batches, or to the end."""
        async with self.http, self.consumer:
            began = anyio.current_time()
            async for batch in self.consumer.batches():
                self.batches.append(batch)
                self.times.append(anyio.current_time() - began)
                await batch.commit()
                if len(self.batches) >= batches:
                    return

    def numbers(self) -> list[int]:
        return [event.json()["n"] for batch in self.batches for event in batch]


@BACKENDS
@pytest.mark.parametrize("most", [1, 7, 100, 5000])
def test_r03_batches_of_a_page_are_made_up_to_a_number_of_events(most: int, backend: str) -> None:
    limits = Limits(max_batch_events=most)
    setting = Setting(1000, page_size=1000, limits=limits, follow=False)
    run_in_virtual_time(setting.read, backend)
    assert setting.numbers() == list(range(1000))
    assert max(setting.sizes) <= most
    # Parts of an eighth are joined, so that only the last one may be much smaller.
    assert all(size >= most * 7 // 8 for size in setting.sizes[:-1])


@BACKENDS
def test_r03_a_batch_holds_what_one_checkpoint_closes(backend: str) -> None:
    limits = Limits(max_batch_events=10)
    setting = Setting(100, page_size=50, limits=limits, follow=False)
    setting.publisher.checkpoint_every = 50
    run_in_virtual_time(setting.read, backend)
    assert setting.sizes == [50, 50]


@BACKENDS
def test_a_batch_that_could_have_more_events_is_delivered_at_once(backend: str) -> None:
    setting = Setting(50, page_size=10, limits=Limits(max_batch_events=100), follow=True)

    async def test() -> None:
        with anyio.fail_after(HOUR):
            await setting.read(batches=1)

    run_in_virtual_time(test, backend)
    assert setting.times == [0.0]


def test_it_is_optional_and_positive() -> None:
    assert Limits().max_batch_events is None
    with pytest.raises(ValueError, match="must be positive"):
        Limits(max_batch_events=0)
