"""The process whose plug is pulled: ``python -m tests.crash.consumer URL DATABASE [--cursor inside|before|after] [--poison] [--to-the-end]``.

Writes a sign of life to stdout at each step of its work, so that the one who kills it can choose any of them. Ends with code 3 when it is fenced.
"""

from __future__ import annotations

import argparse
import os
import random
import sys

import anyio

from feedapi_client import Batch, FeedConsumer, FencedError, Limits
from feedapi_client.quarantine.policy import Handler
from tests.crash.application import Application, Row, application_class

FENCED = 3
OPENED, STEP = b"o", b"."
_PAUSE_SECONDS = 0.003
POISON = 17
"""With ``--poison`` the application can't handle each entity's every 17th event, and quarantines it."""


class PoisonError(Exception):
    """The application's own."""


async def step() -> None:
    """A sign of life, and a moment in which the process may die."""
    os.write(1, STEP)
    await anyio.sleep(random.uniform(0, _PAUSE_SECONDS))


def handler(application: Application, cursor: str, *, poison: bool) -> Handler:
    """Writes the events of a batch and commits: the cursor inside the transaction of the effects, or before it, or after it."""

    async def write(transaction: object, batch: Batch) -> None:
        payloads = [event.json() for event in batch.events]
        rows = [
            Row(batch.partition, payload["entity"], payload["n"], os.getpid())
            for payload in payloads
        ]
        half = len(rows) // 2
        for part in (rows[:half], rows[half:]):
            if part:
                await application.write(transaction, part)
            await step()
        if poison and any(row.n % POISON == 0 for row in rows):
            raise PoisonError

    async def inside(batch: Batch) -> None:
        async with application.transaction() as transaction:
            await write(transaction, batch)
            await batch.commit(transaction=transaction)
            await step()
        await step()

    async def before(batch: Batch) -> None:
        await batch.commit()
        await step()
        async with application.transaction() as transaction:
            await write(transaction, batch)
        await step()

    async def after(batch: Batch) -> None:
        async with application.transaction() as transaction:
            await write(transaction, batch)
        await step()
        await batch.commit()
        await step()

    return {"inside": inside, "before": before, "after": after}[cursor]


async def consume(url: str, database: str, cursor: str, *, poison: bool, follow: bool) -> None:
    """Run until killed, or to the end of the feed."""
    application = application_class(database)(database)
    # Small batches and short pauses: many moments to be killed in.
    limits = Limits(poll_interval=0.01, max_poll_interval=0.1, max_batch_bytes=500)
    try:
        async with FeedConsumer(
            url, store=application.store, follow=follow, limits=limits
        ) as consumer:
            os.write(1, OPENED)
            await consumer.run(
                handler(application, cursor, poison=poison),
                on_failure="quarantine" if poison else "raise",
            )
    finally:
        with anyio.CancelScope(shield=True):
            await application.aclose()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("database")
    parser.add_argument("--cursor", choices=["inside", "before", "after"], default="inside")
    parser.add_argument("--poison", action="store_true")
    parser.add_argument("--to-the-end", action="store_true")
    args = parser.parse_args()
    try:
        anyio.run(
            lambda: consume(
                args.url, args.database, args.cursor, poison=args.poison, follow=not args.to_the_end
            )
        )
    except FencedError as error:
        print(error, file=sys.stderr)
        sys.exit(FENCED)


if __name__ == "__main__":
    main()
