"""`MemoryCursorStore`: the contract."""

from __future__ import annotations

import pytest

from feedapi_client.stores.memory import MemoryCursorStore
from feedapi_client.testing.contracts import AdministrableStoreContract


class TestMemoryCursorStore(AdministrableStoreContract):
    supports_transactions = False
    supports_second_handle = False
    supports_failure_injection = False

    @pytest.fixture
    def store(self) -> MemoryCursorStore:
        return MemoryCursorStore()
