"""Test suites that every cursor store passes. Subclass one, and the tests run on your store.

They need pytest and anyio's pytest plugin, which comes with anyio. A subclass, named ``Test...``,
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

from feedapi_client.testing.contracts.administration import AdministrationTests
from feedapi_client.testing.contracts.contract_positions import advanced, opening
from feedapi_client.testing.contracts.done_contract import DoneTests
from feedapi_client.testing.contracts.fencing import FencingTests
from feedapi_client.testing.contracts.lease_contract import LeaseStoreContract
from feedapi_client.testing.contracts.saving import SavingTests
from feedapi_client.testing.contracts.storage_failures import FailureTests
from feedapi_client.testing.contracts.transactions import TransactionTests

__all__ = [
    "AdministrableStoreContract",
    "CursorStoreContract",
    "DoneStoreContract",
    "LeaseStoreContract",
    "advanced",
    "opening",
]


class CursorStoreContract(SavingTests, FencingTests, TransactionTests, FailureTests):
    """What `CursorStore` promises, as tests."""


class AdministrableStoreContract(CursorStoreContract, AdministrationTests):
    """What `AdministrableStore` promises beyond that, as tests."""


class DoneStoreContract(DoneTests):
    """What `DoneStore` promises beyond `CursorStore`, as tests. Run both."""
