"""The effects of the demo's application: one row for each event that it handled."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from feedapi_client.cli.demo.proof import Step
from feedapi_client.model import Batch


class Payload(msgspec.Struct):
    """The payload of an event: event number `n` of an entity."""

    entity: str
    n: int


class Effects:
    """A table in the SQLite file that holds the cursors too."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=OFF")
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS effects (row INTEGER PRIMARY KEY AUTOINCREMENT, "
            "entity TEXT NOT NULL, n INTEGER NOT NULL)"
        )

    def add(self, batch: Batch) -> None:
        """Insert a row for each event, in the transaction that is open."""
        payloads = [event.decode(Payload) for event in batch.events]
        self.connection.executemany(
            "INSERT INTO effects (entity, n) VALUES (?, ?)",
            [(payload.entity, payload.n) for payload in payloads],
        )

    def count(self) -> int:
        """Return how many events were handled."""
        return int(self.connection.execute("SELECT count(*) FROM effects").fetchone()[0])

    def steps(self) -> list[Step]:
        """Return the events in the order in which they were handled."""
        return list(self.connection.execute("SELECT entity, n FROM effects ORDER BY row"))

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
