from __future__ import annotations

import pytest

from tests.servers import mariadb, postgres

__all__ = ["mariadb", "postgres"]


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)
