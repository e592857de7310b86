"""The README's programs on exactly once and on poison events run unchanged but for addresses."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from feedapi_client.testing import Publisher
from tests.servers import Postgres

README = Path(__file__).parents[2] / "README.md"


def run_program(chapter: str, directory: Path, **addresses: str) -> str:
    text = README.read_text().partition(f"\n## {chapter}\n")[2].partition("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
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
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_for_exactly_once_resumes_from_its_database(
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
            "Exactly once, with a database",
            tmp_path,
            feed=feedapi_publisher.url or "",
            database=postgres.url(),
        )
    with engine.begin() as connection:
        assert list(connection.execute(sa.text("SELECT id FROM orders")).scalars()) == list(
            range(20)
        )
    engine.dispose()


def test_the_program_for_poison_events_quarantines_the_failing_event(
    feedapi_publisher: Publisher, tmp_path: Path
) -> None:
    feedapi_publisher.extend(0, [{"id": id} for id in range(20)])
    (line,) = run_program("Poison events", tmp_path, feed=feedapi_publisher.url or "").splitlines()
    assert line.split()[1:] == ["0", "IntegrityError"]
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        assert [row[0] for row in connection.execute("SELECT id FROM orders")] == [
            id for id in range(20) if id != 13
        ]
