"""Every payment is booked exactly once, whatever happens to this process.

Balances and cursors are in one PostgreSQL database and change in one transaction. Kill the process
at any moment and start it again: it resumes where the last transaction ended.

    pip install 'feedapi-client[postgresql]'
    python examples/exactly_once_postgres.py --feed https://service/payments \\
        --database postgresql+psycopg://user@host/bank

Without arguments it starts a feed and a database of its own, and ends when it has read everything.
"""

from __future__ import annotations

import argparse
import asyncio

import msgspec
import sqlalchemy as sa
from demo_servers import feed_of_payments, postgres
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from feedapi_client import Batch, FeedConsumer, SQLAlchemyCursorStore

metadata = sa.MetaData()
accounts = sa.Table(
    "accounts",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("balance", sa.BigInteger, nullable=False),
)


class Payment(msgspec.Struct):
    """The payload of an event."""

    account: str
    amount: int


async def book(transaction: AsyncConnection, payment: Payment) -> None:
    new = insert(accounts).values(name=payment.account, balance=payment.amount)
    await transaction.execute(
        new.on_conflict_do_update(
            index_elements=["name"], set_={"balance": accounts.c.balance + new.excluded.balance}
        )
    )


async def consume(feed: str, engine: AsyncEngine, *, follow: bool) -> None:
    # The store's table is part of the application's schema, also for its migrations.
    store = SQLAlchemyCursorStore(engine, metadata=metadata)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)

    async def handle(batch: Batch) -> None:
        async with engine.begin() as transaction:
            for event in batch.events:
                await book(transaction, event.decode(Payment))
            await batch.commit(transaction=transaction)  # the balances and the cursor, or neither

    async with FeedConsumer(feed, store=store, name="bookkeeping", follow=follow) as consumer:
        await consumer.run(handle)


async def main(feed: str, database: str, *, follow: bool) -> None:
    engine = create_async_engine(database, pool_pre_ping=True)
    try:
        await consume(feed, engine, follow=follow)
        async with engine.connect() as connection:
            for name, balance in await connection.execute(
                sa.select(accounts).order_by(accounts.c.name)
            ):
                print(f"{name:10} {balance:8}")
    finally:
        await engine.dispose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--feed")
    parser.add_argument("--database")
    parser.add_argument("--follow", action="store_true", help="go on at the end of the feed")
    args = parser.parse_args()
    with feed_of_payments(args.feed) as feed, postgres(args.database) as database:
        asyncio.run(main(feed, database, follow=args.follow))
