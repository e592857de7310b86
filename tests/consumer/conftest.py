from __future__ import annotations

from collections.abc import Callable

import pytest

from feedapi_client.testing import Publisher
from tests.consumer.helpers import RecordingStore


@pytest.fixture
def serve(feedapi_publisher_factory: Callable[..., Publisher]) -> Callable[..., Publisher]:
    """Makes publishers on loopback ports."""
    return feedapi_publisher_factory


@pytest.fixture
def publisher(serve: Callable[..., Publisher]) -> Publisher:
    """One partition, pages of 10 events, a checkpoint behind each 5."""
    return serve(page_size=10, checkpoint_every=5)


@pytest.fixture
def store() -> RecordingStore:
    return RecordingStore()
