"""Exactly once with SQLAlchemy's ORM, and a quarantine for payments that can't be booked.

As exactly_once_postgres.py, but with mapped classes and one session for each batch. No account may
be overdrawn: the database refuses such a payment. It goes into quarantine, in the transaction that
books the others, and the feed goes on. ``feedapi quarantine`` lists, shows, replays and drops
quarantined events (elsewhere: a dead-letter queue).

    pip install 'feedapi-client[postgresql]'
    python examples/exactly_once_orm.py --feed https://service/payments \\
        --database postgresql+psycopg://user@host/bank

Without arguments it starts a feed and a database of its own, and ends when it has read everything.
"""

from __future__ import annotations

import argparse
import asyncio

import sqlalchemy as sa
from demo_servers import feed_of_payments, postgres
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from feedapi_client import Batch, Event, FeedConsumer, Quarantine, Retry, SQLAlchemyCursorStore
from feedapi_client.quarantine import SQLAlchemyQuarantineStore, list_events


class Base(DeclarativeBase):
    """What the application stores.

    The tables of cursors and quarantine are in the same metadata, so that migrations see them.
    """


class Account(Base):
    """A customer's account."""

    __tablename__ = "customer_accounts"
    __table_args__ = (sa.CheckConstraint("balance >= 0", name="not_overdrawn"),)

    name: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(sa.BigInteger, default=0)
    payments: Mapped[int] = mapped_column(default=0)


async def book(session: AsyncSession, event: Event) -> None:
    payment = event.json()
    account = await session.get(Account, payment["account"])
    if account is None:
        account = Account(name=payment["account"], balance=0, payments=0)
        session.add(account)
    account.balance += payment["amount"]
    account.payments += 1


async def consume(feed: str, engine: AsyncEngine, *, follow: bool) -> SQLAlchemyQuarantineStore:
    store = SQLAlchemyCursorStore(engine, metadata=Base.metadata)
    quarantine = SQLAlchemyQuarantineStore(engine, metadata=Base.metadata)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    sessions = async_sessionmaker(engine)

    async def handle(batch: Batch) -> None:
        async with sessions.begin() as session:
            for event in batch.events:
                await book(session, event)
            await batch.commit(transaction=session)

    async with FeedConsumer(feed, store=store, name="bookkeeping", follow=follow) as consumer:
        await consumer.run(
            handle,
            on_failure=Retry(
                attempts=2, then=Quarantine(to=quarantine, errors=(sa.exc.IntegrityError,))
            ),
        )
    return quarantine


async def main(feed: str, database: str, *, follow: bool) -> None:
    engine = create_async_engine(database, pool_pre_ping=True)
    try:
        quarantine = await consume(feed, engine, follow=follow)
        async with AsyncSession(engine) as session:
            for account in await session.scalars(sa.select(Account).order_by(Account.name)):
                print(f"{account.name:10} {account.balance:8} in {account.payments} payments")
        async for event in list_events(quarantine):
            place = f"event {event.index} of partition {event.partition}"
            print(f"in quarantine: {place}, {event.error_type}")
    finally:
        await engine.dispose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--feed")
    parser.add_argument("--database")
    parser.add_argument("--follow", action="store_true", help="go on at the end of the feed")
    args = parser.parse_args()
    with feed_of_payments(args.feed, overdraft=True) as feed, postgres(args.database) as database:
        asyncio.run(main(feed, database, follow=args.follow))
