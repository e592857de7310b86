"""The program of the documentation's page on the quarantine runs as it is, but for the address."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from feedapi_client.testing import Publisher
from tests.docs.snippets import python_blocks


def run_program(page: str, directory: Path, feed: str) -> str:
    (program,) = python_blocks(page)
    program = program.replace("https://service/orders", feed)
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


def test_the_quarantine_program_quarantines_the_failing_event(
    feedapi_publisher: Publisher, tmp_path: Path
) -> None:
    feedapi_publisher.extend(0, [{"id": id} for id in range(20)])
    printed = run_program("docs/pages/quarantine.md", tmp_path, feedapi_publisher.url or "")
    (line,) = printed.splitlines()
    assert line.split()[1:] == ["0", "IntegrityError"]
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        assert [row[0] for row in connection.execute("SELECT id FROM orders")] == [
            id for id in range(20) if id != 13
        ]
