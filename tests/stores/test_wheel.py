"""The wheel as after `pip install feedapi-client`, without any extra."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from feedapi_client.testing import Publisher
from tests.consumer.helpers import fill

ROOT = Path(__file__).parents[2]
EXTRAS = (
    *("aiosqlite", "asgiref", "asyncmy", "asyncpg", "django", "psycopg", "psycopg_pool", "redis"),
    *("sqlalchemy", "gufo", "nats", "obstore", "opentelemetry", "prometheus_client", "pyarrow"),
    *("pyspark", "rich", "starlette", "typer", "uvicorn"),
)
BLOCKED = f"""
import sys
for name in {EXTRAS!r}:
    sys.modules[name] = None
"""
CONSUMING = """
import sqlite3
import feedapi_client
from feedapi_client import *
from feedapi_client import PostgresCursorStore, SQLiteCursorStore, SyncFeedConsumer
from feedapi_client.stores import in_callers_thread

database = sqlite3.connect("app.db")
database.execute("CREATE TABLE effects (n integer)")
with SyncFeedConsumer({url!r}, store=SQLiteCursorStore("app.db"), follow=False) as consumer:
    for batch in consumer.batches():
        with database:
            database.executemany(
                "INSERT INTO effects VALUES (?)", [(event.json()["n"],) for event in batch]
            )
            batch.commit(transaction=database)
print(feedapi_client.__file__, database.execute("SELECT count(*) FROM effects").fetchone()[0])
"""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    zipfile.ZipFile(file).extractall(folder / "site")
    return folder / "site"


def run(program: str, site: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_any_extra_a_program_consumes_exactly_once(site: Path, tmp_path: Path) -> None:
    publisher = Publisher(2, page_size=10)
    fill(publisher, 50)
    with publisher.serve() as url:
        done = run(BLOCKED + CONSUMING.format(url=url), site, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(site / "feedapi_client" / "__init__.py"), "50"]


@pytest.mark.parametrize(
    ("statement", "extra"),
    [
        ("import feedapi_client.django", "django"),
        ("from feedapi_client import SQLAlchemyCursorStore", "sql"),
        ("from feedapi_client import RedisCursorStore", "redis"),
        ("from feedapi_client import PostgresCursorStore as s; s('postgresql:///')", "psycopg"),
    ],
)
def test_what_needs_an_extra_names_it(
    site: Path, tmp_path: Path, statement: str, extra: str
) -> None:
    done = run(BLOCKED + statement, site, tmp_path)
    assert done.stderr.strip().endswith(f"pip install 'feedapi-client[{extra}]'")


def test_the_migrations_of_django_are_in_the_wheel(site: Path) -> None:
    found = {file.name for file in (site / "feedapi_client/django/migrations").glob("*.py")}
    assert found == {file.name for file in (ROOT / "feedapi_client/django/migrations").glob("*.py")}
    assert "0001_initial.py" in found
