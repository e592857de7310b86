"""What the Spark tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from feedapi_client.spark.fetch import close_connections


@pytest.fixture(autouse=True)
def _no_connection_stays_open() -> Iterator[None]:
    yield
    close_connections()
