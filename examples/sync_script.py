"""Read a feed without async, exactly once, as a script, a notebook or a job in cron does.

Effects and cursors are in one file of SQLite, and each batch is one transaction.

python examples/sync_script.py [URL]
"""

import sqlite3
import sys
from contextlib import closing, nullcontext

from feedapi_client import SQLiteCursorStore, SyncFeedConsumer
from feedapi_client.testing import Publisher

DATABASE = "sync_script.db"


def main(url: str) -> None:
    store = SQLiteCursorStore(DATABASE)
    with (
        closing(sqlite3.connect(DATABASE)) as database,
        SyncFeedConsumer(url, store=store, follow=False) as consumer,
    ):
        database.execute("CREATE TABLE IF NOT EXISTS events (payload TEXT)")
        for batch in consumer.batches():
            with database:  # commits the effects and the cursor, or neither
                for event in batch:
                    database.execute("INSERT INTO events VALUES (?)", [event.raw])
                    print(event.json())
                batch.commit(transaction=database)
        (count,) = database.execute("SELECT count(*) FROM events").fetchone()
        print(f"{count} events in {DATABASE}")


if __name__ == "__main__":
    publisher = Publisher(1, page_size=5, checkpoint_every=5)
    publisher.extend(0, [{"n": n} for n in range(12)])
    with nullcontext(sys.argv[1]) if len(sys.argv) > 1 else publisher.serve() as url:
        main(url)
