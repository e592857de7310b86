"""One raw server for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.server import RawServer


@pytest.fixture(scope="session")
def server() -> Iterator[RawServer]:
    with RawServer() as running:
        yield running
