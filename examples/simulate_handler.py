"""Run a handler through histories in which everything goes wrong that can.

The process is killed at any moment, the publisher splits partitions and fails, the database is slow
and fails. The handler is right if each order is there once after every history.

python examples/simulate_handler.py
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from feedapi_client import Batch, SQLiteCursorStore
from feedapi_client.testing.simulator import SimulationError, simulate

# ---------------------------------------------------------------------- the application


class Orders:
    """Keeps orders in the file that the cursors are kept in."""

    def __init__(self, store: SQLiteCursorStore) -> None:
        self.path = store.path
        with closing(sqlite3.connect(self.path)) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS orders (entity INTEGER, n INTEGER)")

    async def handle(self, batch: Batch) -> None:
        """Save the orders and the cursor in one transaction."""
        with closing(sqlite3.connect(self.path)) as database, database:
            insert(database, batch)
            await batch.commit(transaction=database)

    async def handle_wrongly(self, batch: Batch) -> None:
        """Commit first: what is killed in between loses orders."""
        await batch.commit()
        with closing(sqlite3.connect(self.path)) as database, database:
            insert(database, batch)


def insert(database: sqlite3.Connection, batch: Batch) -> None:
    orders = [event.json() for event in batch.events]
    database.executemany("INSERT INTO orders VALUES (:entity, :n)", orders)


# ---------------------------------------------------------------------- its simulation


def new_store(folder: Path) -> SQLiteCursorStore:
    return SQLiteCursorStore(folder / "app.db")


def orders_in(store: SQLiteCursorStore) -> list[tuple[int, int]]:
    with closing(sqlite3.connect(Orders(store).path)) as database:
        return database.execute("SELECT entity, n FROM orders ORDER BY rowid").fetchall()


if __name__ == "__main__":
    simulate(lambda store: Orders(store).handle, new_store, applied=orders_in, seeds=50)
    print("50 histories: every order was there once, in its order")
    try:
        simulate(lambda store: Orders(store).handle_wrongly, new_store, applied=orders_in)
    except SimulationError as error:
        print(f"the wrong handler: {error}")
