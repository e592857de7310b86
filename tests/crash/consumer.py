"""The consumer process that is killed: ``python -m tests.crash.consumer URL DATABASE [OPTIONS]``.

It works in lock-step with the process that watches it. At each step of its work it writes one byte
to stdout, which says where it is, and waits for a byte on stdin before it goes on. The process can
thus be killed at an exact point, or be let go and killed at any moment until the next one. It ends
with code 3 when it is fenced.
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
OPENED = b"o"
"""The consumer is open and has read no event."""
HALF_WRITTEN = b"h"
"""The first half of a batch's effects is written."""
WRITTEN = b"w"
"""All effects of a batch are written."""
BETWEEN = b"b"
"""Of effects and cursor only one is saved: in one open transaction, or separately."""
DONE = b"d"
"""Effects and cursor of a batch are saved."""
STEPS = (OPENED, HALF_WRITTEN, WRITTEN, BETWEEN, DONE)

POISON = 17
"""With ``--poison`` the application can't handle each entity's every 17th event."""
_PAUSE_SECONDS = 0.003


class PoisonError(Exception):
    """Raised by the application for an event that it can't handle."""


async def reach(step: bytes) -> None:
    """Announce a step and wait for permission to go on, then let the other handlers go on."""
    os.write(1, step)
    if not os.read(0, 1):
        sys.exit("the watching process is gone")
    await anyio.sleep(random.uniform(0, _PAUSE_SECONDS))


def make_handler(application: Application, cursor: str, *, poison: bool) -> Handler:
    """Make a handler that writes the events of a batch and commits.

    `cursor` says where it saves the cursor: "inside" the transaction of the effects, "before" it,
    or "after" it.
    """

    async def write(transaction: object, batch: Batch) -> None:
        payloads = [event.json() for event in batch.events]
        rows = [
            Row(batch.partition, payload["entity"], payload["n"], os.getpid())
            for payload in payloads
        ]
        half = len(rows) // 2
        for part, step in ((rows[:half], HALF_WRITTEN), (rows[half:], WRITTEN)):
            if part:
                await application.write(transaction, part)
            await reach(step)
        if poison and any(row.n % POISON == 0 for row in rows):
            raise PoisonError

    async def inside(batch: Batch) -> None:
        async with application.transaction() as transaction:
            await write(transaction, batch)
            await batch.commit(transaction=transaction)
            await reach(BETWEEN)
        await reach(DONE)

    async def before(batch: Batch) -> None:
        await batch.commit()
        await reach(BETWEEN)
        async with application.transaction() as transaction:
            await write(transaction, batch)
        await reach(DONE)

    async def after(batch: Batch) -> None:
        async with application.transaction() as transaction:
            await write(transaction, batch)
        await reach(BETWEEN)
        await batch.commit()
        await reach(DONE)

    return {"inside": inside, "before": before, "after": after}[cursor]


async def consume(url: str, database: str, cursor: str, *, poison: bool, follow: bool) -> None:
    """Run until killed, or to the end of the feed."""
    application = application_class(database)(database)
    # Small batches and short pauses: many steps to be killed at.
    limits = Limits(poll_interval=0.01, max_poll_interval=0.1, max_batch_bytes=500)
    try:
        async with FeedConsumer(
            url, store=application.store, follow=follow, limits=limits
        ) as consumer:
            await reach(OPENED)
            await consumer.run(
                make_handler(application, cursor, poison=poison),
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
