from __future__ import annotations

import ssl
from collections.abc import Callable

import httpx
import pytest

from feedapi_client.testing import Publisher
from tests.consumer.helpers import RecordingStore

_TLS = httpx.create_ssl_context()


@pytest.fixture(autouse=True)
def _one_tls_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the certificates takes longer than most of these tests, which speak plain HTTP."""

    def shared(*_: object, **__: object) -> ssl.SSLContext:
        return _TLS

    monkeypatch.setattr("httpx._transports.default.create_ssl_context", shared)


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
