"""Whatever happens to a feed and however often its consumer crashes: each entity's events are
applied in order and exactly once.
"""

from __future__ import annotations

import os
from random import Random
from typing import Any, Literal

import anyio
import pytest

from feedapi_client import FetchOptions, TransportError
from feedapi_client.testing import Publisher, faults
from tests.consumer.helpers import (
    SAFETY_LIMIT,
    RecordingStore,
    Transaction,
    assert_each_entity_in_order_and_once,
    by_entity,
    consume,
)

pytestmark = pytest.mark.anyio

Method = Literal["starts-after", "cursor-from"]

HISTORIES = int(os.environ.get("FEEDAPI_HISTORIES", "6"))
"""How many are tested; set the variable for a long run."""

TEMPORARY_FAULTS = [
    503,
    409,
    faults.Status(429, headers={"retry-after": "0.01"}),
    faults.CutLine(),
    faults.ErrorText(after_lines=3),
    faults.Truncate(after_lines=4),
    faults.Reset(after_lines=2),
    faults.NoFinalNewline(),
    faults.NoCheckpoint(keep=1),
    faults.EmptyPage(),
    faults.UnknownCommands(),
    faults.Trickle(piece=50),
]


class History:
    """Lets a publisher do, at random, whatever a correct one may do."""

    def __init__(self, publisher: Publisher, random: Random) -> None:
        self.publisher = publisher
        self.random = random
        self.published = 0
        self.splits = 0

    def publish(self, count: int) -> None:
        for _ in range(count):
            entity = f"e{self.random.randrange(12)}"
            self.publisher.publish(entity, {"entity": entity, "n": self.published})
            self.published += 1

    def step(self) -> None:
        publisher, random = self.publisher, self.random
        what = random.random()
        if what < 0.6:
            self.publish(random.randint(1, 25))
        elif what < 0.72 and self.splits < 6:
            self.split()
        elif what < 0.8:
            publisher.rotate_token()
        elif len(publisher.faults) > 3:
            pass  # more in a row may be an error
        elif what < 0.95:
            publisher.fail(random.choice(TEMPORARY_FAULTS), on="fetch")  # type: ignore[arg-type]
        else:
            publisher.fail(503, on="discovery")

    def split(self) -> None:
        # A redistributed partition must not start after another one: discovery can't say both.
        partition = self.random.choice(self.publisher.open_partitions())
        child = self.publisher.partitions[partition].starts_after is not None
        method: Method = (
            "starts-after" if child else self.random.choice(("starts-after", "cursor-from"))
        )
        self.publisher.split(partition, self.random.randint(1, 3), method=method)
        self.splits += 1


class Application:
    """Keeps effects and cursor in one transaction; `outside_transaction` breaks that on purpose."""

    def __init__(
        self,
        publisher: Publisher,
        random: Random,
        way: str,
        stream: bool,
        outside_transaction: bool,
    ) -> None:
        self.publisher = publisher
        self.random = random
        self.way = way
        self.outside_transaction = outside_transaction
        self.fetch = FetchOptions(stream=True) if stream else None
        self.store = RecordingStore()
        self.effects: list[Any] = []

    async def run(self, **options: Any) -> None:
        """Run one process of it: until it crashes or, without `follow`, to the end of the feed."""
        limit = {"max_batch_bytes": self.random.choice([1, 500, 1_000_000])}
        async with consume(
            self.publisher, store=self.store, limit=limit, fetch=self.fetch, **options
        ) as consumer:
            if self.way == "run":
                await consumer.run(self.handle, max_concurrency=self.random.choice([1, 3, 20]))
                return
            async for batch in consumer.batches():
                await self.handle(batch)

    async def handle(self, batch: Any) -> None:
        if self.outside_transaction:
            self.effects += [event.json() for event in batch.events]
            await anyio.sleep(self.random.random() * 0.01)
            await batch.commit()
            return
        if self.random.random() < 0.1:
            await batch.commit(Transaction())  # rolled back
        await anyio.sleep(self.random.random() * 0.002)
        transaction = Transaction()
        await batch.commit(transaction)
        await anyio.lowlevel.checkpoint()
        await self.store.commit_at_once(transaction)  # a crash keeps both or neither
        self.effects += [event.json() for event in batch.events]


async def run_with_crashes(
    seed: int, way: str, *, outside_transaction: bool = False
) -> Application:
    """Let an application crash again and again, and at last read what is left.

    Crashes come after a number of steps of the history, not after a time: a slow machine sees as
    many of them.
    """
    random = Random(f"{seed} {way}")
    dialect: Any = random.choice(["v2-draft", "v2-token"])
    stream = random.random() < 0.3
    publisher = Publisher(
        random.randint(1, 3),
        dialect=dialect,
        page_size=20,
        checkpoint_every=4,
        seed=seed,
        stream=stream,
    )
    history = History(publisher, random)
    application = Application(publisher, Random(f"{seed} {way}"), way, stream, outside_transaction)
    async with publisher.serve():
        history.publish(20)
        for _ in range(8):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_restart_after_errors, application)
                for _ in range(random.randint(1, 15)):
                    history.step()
                    await anyio.sleep(random.random() * 0.01)
                tasks.cancel_scope.cancel()
            if random.random() < 0.5:
                history.step()  # while it is down
        publisher.heal()
        with anyio.fail_after(SAFETY_LIMIT):
            await application.run(follow=False)
    assert history.published > 40
    return application


@pytest.mark.parametrize("way", ["batches", "run"])
@pytest.mark.parametrize("seed", range(HISTORIES))
async def test_any_history_is_applied_in_order_and_exactly_once(seed: int, way: str) -> None:
    application = await run_with_crashes(seed, way)
    assert_each_entity_in_order_and_once(application.effects, application.publisher)


async def test_effects_outside_the_transaction_are_detected() -> None:
    for seed in range(20):
        application = await run_with_crashes(seed, "run", outside_transaction=True)
        if by_entity(application.effects) != by_entity(application.publisher.payloads()):
            return
    raise AssertionError("an application that is not exactly once passes")


async def _restart_after_errors(application: Application) -> None:
    """Restart the application as a supervisor does: some faults in a row may be an error."""
    while True:
        try:
            await application.run()
        except TransportError:
            await anyio.sleep(0.005)
