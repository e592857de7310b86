from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers import Postgres, postgres

__all__ = ["postgres"]


@pytest.fixture
def anyio_backend() -> str:
    """The processes are what is tested. This side only waits for them."""
    return "asyncio"


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "app.db")
    server: Postgres = request.getfixturevalue("postgres")
    return server.dsn
