from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from feedapi_client import SQLiteCursorStore
from feedapi_client.testing import Publisher
from tests.quarantine.helpers import Ledger


@pytest.fixture
def publisher(feedapi_publisher_factory: Callable[..., Publisher]) -> Publisher:
    """A feed of 20 events in one batch; the entity is n modulo 3."""
    publisher = feedapi_publisher_factory(page_size=20, checkpoint_every=20)
    publisher.extend(0, [{"entity": f"e{n % 3}", "n": n} for n in range(20)])
    return publisher


@pytest.fixture
def store(tmp_path: Path) -> SQLiteCursorStore:
    return SQLiteCursorStore(tmp_path / "app.db")


@pytest.fixture
def ledger(publisher: Publisher, store: SQLiteCursorStore) -> Ledger:
    return Ledger(publisher, store)
