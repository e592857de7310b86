"""The programs that keep their cursors in a transaction of their own, on a real PostgreSQL."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from feedapi_client.testing import Publisher
from tests import warm
from tests.docs.snippets import ROOT, python_blocks
from tests.servers import Postgres

PAGE = "docs/pages/guides/your-transaction.md"
FEED = "https://service/myfeed"
TIMEOUT = 100
NAMES = (
    "asyncpg",
    "psycopg",
    "psycopg in threads",
    "sqlalchemy",
    "synchronous sqlalchemy",
    "django",
)
PROGRAMS = dict(zip(NAMES, python_blocks(PAGE), strict=True))
DROP = (
    "DROP TABLE IF EXISTS orders, feedapi_cursors, feedapi_cursors_instances, "
    "feedapi_cursors_leases, feedapi_cursors_done, feedapi_cursors_journal, "
    "feedapi_quarantine, django_migrations; "
    "DROP SEQUENCE IF EXISTS attempts"
)
FAIL_TWICE = """
CREATE SEQUENCE attempts;
CREATE OR REPLACE FUNCTION fail_twice() RETURNS trigger AS $$ BEGIN
    IF NEW.n = 9 AND nextval('attempts') < 3 THEN RAISE EXCEPTION 'out of order'; END IF;
    RETURN NEW;
END $$ LANGUAGE plpgsql;
CREATE TRIGGER fail_twice BEFORE INSERT ON orders FOR EACH ROW EXECUTE FUNCTION fail_twice()"""
CREATE = "CREATE TABLE orders (id serial, entity text, n integer)"

pytestmark = pytest.mark.slow


class Setting:
    """One of the programs, a feed, and a database without tables."""

    def __init__(self, program: str, postgres: Postgres, feed: str, folder: Path) -> None:
        self.postgres = postgres
        self.path = folder / "program.py"
        text = PROGRAMS[program].replace(FEED, feed)
        text = text.replace("postgresql+psycopg://user@host/app", postgres.url())
        text = text.replace("postgresql://user@host/app", postgres.dsn)
        for name, ours in (
            ("NAME", "postgres"),
            ("USER", "postgres"),
            ("HOST", postgres.directory),
        ):
            text = re.sub(rf'"{name}": "\w+"', f'"{name}": "{ours}"', text)
        # To know the order.
        text = text.replace("INTO orders VALUES", "INTO orders (entity, n) VALUES")
        self.path.write_text(text)
        self.execute(DROP)

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.postgres.dsn) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def start(self) -> subprocess.Popen[str]:
        return warm.Popen(
            [sys.executable, "-W", "error", self.path],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def orders(self) -> list[tuple[str, int]]:
        with psycopg.connect(self.postgres.dsn) as connection:
            return connection.execute("SELECT entity, n FROM orders ORDER BY id").fetchall()


@pytest.fixture(params=PROGRAMS)
def setting(
    request: pytest.FixtureRequest,
    postgres: Postgres,
    feedapi_publisher: Publisher,
    tmp_path: Path,
) -> Iterator[Setting]:
    setting = Setting(request.param, postgres, str(feedapi_publisher.url), tmp_path)
    yield setting
    setting.execute(DROP)


def test_r05_a_program_goes_on_where_its_database_says(
    setting: Setting, feedapi_publisher: Publisher
) -> None:
    setting.execute(CREATE)
    for start in (0, 10):
        feedapi_publisher.extend(0, [{"entity": "a", "n": n} for n in range(start, start + 10)])
        with setting.start() as process:
            assert process.communicate(timeout=TIMEOUT)[1] == ""
            assert process.returncode == 0
        assert setting.orders() == [("a", n) for n in range(start + 10)]


def test_r05_a_program_survives_a_second_failure_of_its_database(
    setting: Setting, feedapi_publisher: Publisher
) -> None:
    """The last row fails twice: each attempt is rolled back, with what was written before it."""
    setting.execute(CREATE)
    setting.execute(FAIL_TWICE)
    feedapi_publisher.extend(0, [{"entity": "a", "n": n} for n in range(10)])
    with setting.start() as process:
        errors = process.communicate(timeout=TIMEOUT)[1]
        assert process.returncode == 0, errors
    assert "attempt" in errors
    assert setting.execute("SELECT nextval('attempts')") == [(4,)]
    assert setting.orders() == [("a", n) for n in range(10)]


def test_r17_of_two_programs_at_once_each_event_is_written_once(
    setting: Setting, feedapi_publisher: Publisher
) -> None:
    setting.execute(CREATE)
    with setting.start() as first:  # PostgreSQL's IF NOT EXISTS is not for two at once
        assert first.wait(TIMEOUT) == 0
    feedapi_publisher.extend(0, [{"entity": "a", "n": n} for n in range(300)])
    processes = [setting.start() for _ in range(2)]
    errors = [process.communicate(timeout=TIMEOUT)[1] for process in processes]
    for process, error in zip(processes, errors, strict=True):
        assert process.returncode == 0 or "FencedError" in error, error
    if any(process.returncode for process in processes):
        with setting.start() as process:
            process.communicate(timeout=TIMEOUT)
    assert setting.orders() == [("a", n) for n in range(300)]
