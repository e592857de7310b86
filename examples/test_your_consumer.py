"""Test an application's own consumer against a publisher in memory.

The fixture `feedapi_publisher` comes with feedapi-client: pytest finds it by itself.

pytest examples/test_your_consumer.py
"""

import anyio
import pytest

from feedapi_client import Batch, FeedConsumer, MemoryCursorStore
from feedapi_client.testing import Publisher, faults

# ---------------------------------------------------------------------- the application


class Balances:
    """The balance of each entity, which the application keeps."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}

    async def handle(self, batch: Batch) -> None:
        """Add the amounts of one batch."""
        for event in batch.events:
            payload = event.json()
            self.of[payload["entity"]] = self.of.get(payload["entity"], 0) + payload["amount"]


async def update(balances: Balances, url: str | None, store: MemoryCursorStore) -> None:
    assert url is not None
    async with FeedConsumer(url, store=store, follow=False) as consumer:
        await consumer.run(balances.handle)


# ---------------------------------------------------------------------- its tests


def test_balances_add_up_over_a_split(feedapi_publisher: Publisher) -> None:
    balances, store = Balances(), MemoryCursorStore()
    feedapi_publisher.publish("a", {"entity": "a", "amount": 1})
    anyio.run(update, balances, feedapi_publisher.url, store)
    feedapi_publisher.split(0, method="starts-after")
    feedapi_publisher.publish("a", {"entity": "a", "amount": 2})
    anyio.run(update, balances, feedapi_publisher.url, store)
    assert balances.of == {"a": 3}


@pytest.mark.parametrize("fault", [503, faults.Truncate(after_lines=3), faults.ErrorText()])
def test_balances_add_up_although_the_publisher_fails(
    feedapi_publisher: Publisher, fault: int | faults.Fault
) -> None:
    feedapi_publisher.extend(0, [{"entity": "a", "amount": 1}] * 10)
    feedapi_publisher.fail(fault, times=2)
    balances = Balances()
    anyio.run(update, balances, feedapi_publisher.url, MemoryCursorStore())
    assert balances.of == {"a": 10}
