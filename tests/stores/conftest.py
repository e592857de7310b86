"""The application of a test that runs `with_drivers`, and a store on its handle."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.stores.drivers import App, Driver, empty, leave_all


@pytest.fixture
async def app(driver: Driver, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[App]:
    async with empty(driver, request, tmp_path) as app:
        yield app


@pytest.fixture
async def store(app: App) -> AsyncIterator[Any]:
    async with app.store() as store:
        yield store
        await leave_all(store)
