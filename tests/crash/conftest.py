from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.application import DJANGO
from tests.servers import MariaDB, Postgres


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


@pytest.fixture(params=["postgresql", "mysql"])
def django_database(request: pytest.FixtureRequest) -> str:
    """A server that Django writes to."""
    if request.param == "mysql":
        mysql: MariaDB = request.getfixturevalue("mariadb")
        return f"{DJANGO}mysql://{mysql.socket}"
    server: Postgres = request.getfixturevalue("postgres")
    return f"{DJANGO}{server.dsn}"
