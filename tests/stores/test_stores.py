"""The contracts of cursors, done events, leases and the journal, over every store and driver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.stores import Journal, JournalledStore
from feedapi_client.testing.contracts import (
    AdministrableStoreContract,
    DoneStoreContract,
    LeaseStoreContract,
)
from tests.stores import drivers
from tests.stores.drivers import App, cases, empty, failing, handle, leave_all
from tests.stores.journal_contract import AGING, JournalContract, Make


class OnDriver:
    """The hooks of the contracts, by the driver of the fixture `case`."""

    @pytest.fixture
    def case(self, request: pytest.FixtureRequest) -> Any:
        return request.param

    @pytest.fixture
    def anyio_backend(self, case: Any) -> str:
        return str(case[1])

    @pytest.fixture
    async def app(
        self, case: Any, request: pytest.FixtureRequest, tmp_path: Path
    ) -> AsyncIterator[App]:
        async with empty(case[0], request, tmp_path) as self.app:
            yield self.app


class StoreOnDriver(OnDriver):
    @pytest.fixture
    async def store(self, app: App) -> AsyncIterator[Any]:
        store = app.store()
        yield store
        await leave_all(store)
        await store.aclose()

    @asynccontextmanager
    async def second_handle(self, store: Any) -> AsyncIterator[Any]:
        async with handle(self.app.driver, self.app.place) as second:
            store = second.store()
            yield store
            await leave_all(store)
            await store.aclose()

    async def begin(self, store: Any) -> Any:
        return await self.app.begin()

    async def commit(self, transaction: Any) -> None:
        await self.app.end(transaction, commit=True)

    async def rollback(self, transaction: Any) -> None:
        await self.app.end(transaction, commit=False)

    @asynccontextmanager
    async def failing(self, store: Any) -> AsyncIterator[None]:
        with failing(self.app):
            yield


@pytest.mark.parametrize("case", cases([drivers.MEMORY]), indirect=True)
class TestMemory(StoreOnDriver, AdministrableStoreContract, DoneStoreContract):
    supports_transactions = supports_second_handle = supports_failure_injection = False


@pytest.mark.parametrize("case", cases(drivers.SQL[1:]), indirect=True)
class TestSQL(StoreOnDriver, AdministrableStoreContract, DoneStoreContract):
    supports_transactions = supports_second_handle = supports_failure_injection = True


@pytest.mark.parametrize("case", cases(drivers.REDIS), indirect=True)
class TestRedis(StoreOnDriver, AdministrableStoreContract):
    supports_transactions = False
    supports_second_handle = supports_failure_injection = True


@pytest.mark.parametrize("case", cases([drivers.MEMORY]), indirect=True)
class TestLeasesInMemory(StoreOnDriver, LeaseStoreContract):
    supports_second_handle = False


LEASING = drivers.SQL[1:]


@pytest.mark.parametrize("case", cases([*LEASING, drivers.REDIS[0]]), indirect=True)
class TestLeases(StoreOnDriver, LeaseStoreContract):
    supports_second_handle = True


@pytest.mark.parametrize("case", cases(LEASING), indirect=True)
class TestJournal(OnDriver, JournalContract):
    @pytest.fixture
    async def make(self, app: App) -> AsyncIterator[Make]:
        async with AsyncExitStack() as stack:

            async def make(journal: Journal | None) -> Any:
                return await stack.enter_async_context(app.store(journal=journal))

            yield make

    async def journal_rows(self, store: JournalledStore) -> int:
        return int(self.app.execute("SELECT COUNT(*) FROM feedapi_cursors_journal")[0][0])

    async def age(self, store: JournalledStore, seconds: int) -> None:
        self.app.execute(*(each.replace(":by", f"{seconds}000000") for each in AGING))
