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
from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from feedapi_client import Batch, Event, FeedConsumer, FencedError, Limits
from feedapi_client.quarantine.policy import Handler
from tests.crash.application import WITHOUT_ASYNC, Application, Row, application_class

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
PAUSE_SECONDS = 0.003
_KEYS_AT_ONCE = 8
_STEPS_BY_KEY = 0.2
"""By key a step is an event's: most are not announced, so that a run gets somewhere."""
_SLOW_BY_KEY = 0.05
_SLOW_SECONDS = 0.3
# Small batches and short pauses: many steps to be killed at. Ends are followed at once, not after
# the 10 s of the default, which are longer than a consumer lives.
LIMITS = Limits(poll_interval=0.01, max_poll_interval=0.1, max_batch_bytes=500, settle_time=0.3)


class PoisonError(Exception):
    """Raised by the application for an event that it can't handle."""


async def reach(step: bytes) -> None:
    """Announce a step and wait for permission to go on, then let the other handlers go on."""
    os.write(1, step)
    if not os.read(0, 1):
        sys.exit("the watching process is gone")
    await anyio.sleep(random.uniform(0, PAUSE_SECONDS))


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


def make_event_handler(
    application: Application, cursor: str, *, poison: bool
) -> Callable[[Event], Awaitable[None]]:
    """Make a handler that writes one event and remembers that it is done.

    `cursor` says where it remembers it, as in `make_handler`.
    """

    async def step(name: bytes) -> None:
        if random.random() < _STEPS_BY_KEY:
            await reach(name)

    async def write(transaction: object, event: Event) -> None:
        payload = event.json()
        row = Row(event.partition, payload["entity"], payload["n"], os.getpid())
        await step(HALF_WRITTEN)
        await application.write(transaction, [row])
        await step(WRITTEN)
        if poison and row.n % POISON == 0:
            raise PoisonError

    async def handle(event: Event) -> None:
        # Some take long, so that much is done ahead of the cursor.
        slow = random.random() < _SLOW_BY_KEY
        await anyio.sleep(random.uniform(0, _SLOW_SECONDS if slow else PAUSE_SECONDS))
        if cursor == "before":
            await event.done()
            await step(BETWEEN)
        async with application.transaction() as transaction:
            await write(transaction, event)
            if cursor == "inside":
                await event.done(transaction=transaction)
                await step(BETWEEN)
        if cursor == "after":
            await step(BETWEEN)
            await event.done()
        await step(DONE)

    return handle


async def consume(
    url: str, database: str, cursor: str, *, poison: bool, follow: bool, by_key: bool
) -> None:
    """Run until killed, or to the end of the feed."""
    application = application_class(database)(database)
    try:
        await application.open()
        async with FeedConsumer(
            url, store=application.store, follow=follow, limits=LIMITS
        ) as consumer:
            await reach(OPENED)
            if by_key:
                await consumer.run_by_key(
                    make_event_handler(application, cursor, poison=poison),
                    key=lambda event: event.json()["entity"],
                    event_id=lambda event: f"{event.json()['entity']} {event.json()['n']}",
                    max_concurrency=_KEYS_AT_ONCE,
                    on_failure="quarantine" if poison else "raise",
                )
                return
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
    parser.add_argument("--by-key", action="store_true")
    parser.add_argument("--threads", type=int, default=0, help="without async, in so many threads")
    args = parser.parse_args()
    how = {"poison": args.poison, "follow": not args.to_the_end}
    try:
        if args.threads or args.database.startswith(WITHOUT_ASYNC):
            # It imports this module for the steps; as a program this one has another name.
            from tests.crash import sync_consumer

            sync_consumer.consume(
                args.url,
                args.database,
                args.cursor,
                threads=args.threads or 1,
                limits=LIMITS,
                **how,
            )
        else:
            anyio.run(
                partial(consume, args.url, args.database, args.cursor, **how, by_key=args.by_key)
            )
    except FencedError as error:
        print(error, file=sys.stderr)
        sys.exit(FENCED)


if __name__ == "__main__":
    main()
