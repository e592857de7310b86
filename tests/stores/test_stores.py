"""The contracts of cursors, done events, leases and the journal, over every store and driver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from feedapi_client.stores import Journal, JournalledStore, Lease
from feedapi_client.testing.contracts import (
    AdministrableStoreContract,
    DoneStoreContract,
    LeaseStoreContract,
)
from tests.stores import drivers
from tests.stores.drivers import App, failing, handle, leave_all, with_drivers
from tests.stores.journal_contract import AGING, FEED, JournalContract, Make

SQL = drivers.SQL[1:]


class OnDriver:
    """The hooks of the contracts, by driver."""

    @pytest.fixture
    async def store(self, app: App) -> AsyncIterator[Any]:
        self.app = app
        async with app.store() as store:
            yield store
            await leave_all(store)

    @asynccontextmanager
    async def second_handle(self, store: Any) -> AsyncIterator[Any]:
        async with handle(self.app.driver, self.app.place) as second, second.store() as store:
            yield store
            await leave_all(store)

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


@with_drivers([drivers.MEMORY])
class TestMemory(OnDriver, AdministrableStoreContract, DoneStoreContract):
    supports_transactions = supports_second_handle = supports_failure_injection = False


@with_drivers([*SQL, *drivers.DJANGO])
class TestSQL(OnDriver, AdministrableStoreContract, DoneStoreContract):
    supports_transactions = supports_second_handle = supports_failure_injection = True


@with_drivers(drivers.REDIS)
class TestRedis(OnDriver, AdministrableStoreContract):
    supports_transactions = False
    supports_second_handle = supports_failure_injection = True


class Leases(OnDriver, LeaseStoreContract):
    async def test_a_look_that_repeats_the_last_one_makes_no_lease(self, store: Any) -> None:
        for name in ("a", "b"):
            await store.beat(FEED, name, 1000)
        await store.put(FEED, "a", [Lease(1, "a", 1)])
        last = await store.look(FEED)
        await store.beat(FEED, "a", 2000)
        again = await store.look(FEED, last)
        assert again.leases is last.leases
        assert again.instances[0].expires_in > 1000


@with_drivers([drivers.MEMORY])
class TestLeasesInMemory(Leases):
    supports_second_handle = False


@with_drivers([*SQL, drivers.REDIS[0]])
class TestLeases(Leases):
    supports_second_handle = True


@with_drivers([*SQL, *drivers.DJANGO])
class TestJournal(JournalContract):
    @pytest.fixture
    async def make(self, app: App) -> AsyncIterator[Make]:
        self.app = app
        async with AsyncExitStack() as stack:

            async def make(journal: Journal | None) -> Any:
                return await stack.enter_async_context(app.store(journal=journal))

            yield make

    async def journal_rows(self, store: JournalledStore) -> int:
        return int(self.app.execute("SELECT COUNT(*) FROM feedapi_cursors_journal")[0][0])

    async def age(self, store: JournalledStore, seconds: int) -> None:
        self.app.execute(*(each.replace(":by", f"{seconds}000000") for each in AGING))
