"""The test suites that every store passes. Subclass one, and it runs on your store.

It needs pytest and anyio's pytest plugin, which comes with anyio. A subclass, named ``Test...``,
declares what its store can do, and defines how to reach it::

    class TestMyStore(CursorStoreContract):
        supports_transactions = True
        supports_second_handle = True
        supports_failure_injection = False

        @pytest.fixture
        async def store(self, tmp_path):
            async with MyStore(tmp_path / "db") as store:
                yield store

        @asynccontextmanager
        async def second_handle(self, store):
            async with MyStore(store.path) as second:
                yield second

        async def begin(self, store): ...
        async def commit(self, transaction): ...
        async def rollback(self, transaction): ...

All three capabilities must be declared. The tests of a capability fail when it is not declared, and
are reported as skipped when it is declared False.

Tests run on each backend of the fixture ``anyio_backend``. Override it in the class for a store
that supports only one.
"""

from __future__ import annotations

from feedapi_client.testing.contracts.administration import AdministrableStoreContract
from feedapi_client.testing.contracts.cursors import CursorStoreContract, advanced, opening
from feedapi_client.testing.contracts.done import DoneStoreContract
from feedapi_client.testing.contracts.leases import LeaseStoreContract

__all__ = [
    "AdministrableStoreContract",
    "CursorStoreContract",
    "DoneStoreContract",
    "LeaseStoreContract",
    "advanced",
    "opening",
]
