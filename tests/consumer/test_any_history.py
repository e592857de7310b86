"""Any history of a feed, any crashes of its consumer: each entity's events are applied in order and exactly once."""

from __future__ import annotations

import os
from random import Random
from typing import Any, Literal

import anyio
import pytest

from feedapi_client import FetchOptions, TransportError
from feedapi_client.testing import Publisher, faults
from tests.consumer.helpers import (
    RecordingStore,
    Transaction,
    assert_each_entity_in_order_and_once,
    by_entity,
    consume,
)

pytestmark = pytest.mark.anyio

Method = Literal["starts-after", "cursor-from"]

HISTORIES = int(os.environ.get("FEEDAPI_HISTORIES", "6"))
"""How many; set the variable for a long run."""

PASSING = [
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
    """A publisher that does anything an honest one may do, at random."""

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
            pass  # more in a row are rightly an error
        elif what < 0.95:
            publisher.fail(random.choice(PASSING), on="fetch")  # type: ignore[arg-type]
        else:
            publisher.fail(503, on="discovery")

    def split(self) -> None:
        # A redistributed partition must not itself start after another one: discovery could not say both.
        partition = self.random.choice(self.publisher.open_partitions())
        child = self.publisher.partitions[partition].starts_after is not None
        method: Method = (
            "starts-after" if child else self.random.choice(("starts-after", "cursor-from"))
        )
        self.publisher.split(partition, self.random.randint(1, 3), method=method)
        self.splits += 1


class Application:
    """Effects that live and die with the cursor: both are kept in one transaction of the store."""

    def __init__(
        self, publisher: Publisher, random: Random, way: str, stream: bool, careless: bool
    ) -> None:
        self.publisher = publisher
        self.random = random
        self.way = way
        self.careless = careless
        self.fetch = FetchOptions(stream=True) if stream else None
        self.store = RecordingStore()
        self.effects: list[Any] = []

    async def live(self, **options: Any) -> None:
        """One process of it, until it is cancelled or, without following, at the end of the feed."""
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
        if self.careless:
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
        self.store.commit_at_once(transaction)  # a crash leaves both or neither
        self.effects += [event.json() for event in batch.events]


async def live_through(seed: int, way: str, *, careless: bool = False) -> Application:
    """A history with crashes, and at its end a last life that reads what is left."""
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
    application = Application(publisher, random, way, stream, careless)
    async with publisher.serve():
        history.publish(20)
        for _ in range(8):
            with anyio.move_on_after(random.random() * 0.15):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_survive, application)
                    while True:
                        history.step()
                        await anyio.sleep(random.random() * 0.01)
            if random.random() < 0.5:
                history.step()  # while it is down
        publisher.heal()
        with anyio.fail_after(20):
            await application.live(follow=False)
    assert history.published > 40
    return application


@pytest.mark.parametrize("way", ["batches", "run"])
@pytest.mark.parametrize("seed", range(HISTORIES))
async def test_any_history_is_applied_in_order_and_exactly_once(seed: int, way: str) -> None:
    application = await live_through(seed, way)
    assert_each_entity_in_order_and_once(application.effects, application.publisher)


async def test_the_check_fails_for_effects_outside_the_transaction() -> None:
    for seed in range(20):
        application = await live_through(seed, "run", careless=True)
        if by_entity(application.effects) != by_entity(application.publisher.payloads()):
            return
    raise AssertionError("an application that is not exactly once passes")


async def _survive(application: Application) -> None:
    """Some faults in a row may be an error; its supervisor starts an application again."""
    while True:
        try:
            await application.live()
        except TransportError:
            await anyio.sleep(0.005)
