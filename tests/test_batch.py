"""`Batch` as a collection."""

from __future__ import annotations

from feedapi_client import Batch, SyncFeedClient
from feedapi_client.testing import Publisher


def test_a_batch_gives_its_events(feedapi_publisher: Publisher) -> None:
    feedapi_publisher.extend(0, [{"n": n} for n in range(3)])
    assert feedapi_publisher.url is not None
    with SyncFeedClient(feedapi_publisher.url) as client:
        (batch,) = client.fetch(0, "_first")
    assert isinstance(batch, Batch)
    assert list(batch) == list(batch.events)
    assert [event.json()["n"] for event in batch] == [0, 1, 2]
    assert len(batch) == 3


def test_a_batch_without_events_gives_none_and_is_true() -> None:
    batch = Batch(0, [], "cursor")
    assert list(batch) == []
    assert batch
