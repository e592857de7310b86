"""The programs of the documentation's pages on exactly once and on the quarantine run as they are.

Only the addresses are replaced.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from feedapi_client.testing import Publisher
from tests.docs.snippets import python_blocks
from tests.servers import Postgres


def run_program(page: str, directory: Path, **addresses: str) -> str:
    (program,) = python_blocks(page)
    for written, real in (
        ("https://service/orders", addresses["feed"]),
        ("postgresql+psycopg://user@host/app", addresses.get("database", "")),
    ):
        program = program.replace(written, real)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_exactly_once_program_continues_where_its_database_says(
    postgres: Postgres, feedapi_publisher: Publisher, tmp_path: Path
) -> None:
    engine = sa.create_engine(postgres.url())
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE IF EXISTS orders, feedapi_cursors"))
        connection.execute(sa.text("CREATE TABLE orders (id integer, customer text)"))
    for start in (0, 10):
        feedapi_publisher.extend(
            0, [{"id": id, "customer": "a"} for id in range(start, start + 10)]
        )
        run_program(
            "docs/pages/exactly-once.md",
            tmp_path,
            feed=feedapi_publisher.url or "",
            database=postgres.url(),
        )
    with engine.begin() as connection:
        assert list(connection.execute(sa.text("SELECT id FROM orders")).scalars()) == list(
            range(20)
        )
    engine.dispose()


def test_the_quarantine_program_quarantines_the_failing_event(
    feedapi_publisher: Publisher, tmp_path: Path
) -> None:
    feedapi_publisher.extend(0, [{"id": id} for id in range(20)])
    printed = run_program("docs/pages/quarantine.md", tmp_path, feed=feedapi_publisher.url or "")
    (line,) = printed.splitlines()
    assert line.split()[1:] == ["0", "IntegrityError"]
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        assert [row[0] for row in connection.execute("SELECT id FROM orders")] == [
            id for id in range(20) if id != 13
        ]
