from __future__ import annotations

import pytest

from tests.consumer.conftest import _one_tls_context

__all__ = ["_one_tls_context"]


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)
