"""Kill a relay with SIGKILL while a feed grows, splits and changes its token; check the stream.

A long run: ``python -m tests.liftbridge.kill_relay --mode events --kills 100``. The modes are
at-least-once, batch and events.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import orjson

from feedapi_client.liftbridge import LiftbridgeApi, RelayReader
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeBroker, NatsServer
from feedapi_client.testing.publisher import SplitMethod
from tests import warm
from tests.liftbridge.helpers import eventually

ENTITIES = 20
EVENTS_A_KILL = 400
MESSAGES_A_KILL = {"at-least-once": 300, "events": 300, "batch": 6}
SECONDS_TO_CATCH_UP = 300
MOST_PARTITIONS = 12
METHODS: tuple[SplitMethod, ...] = ("starts-after", "cursor-from")


@dataclass(frozen=True)
class Outcome:
    """The result: numbers of events.

    Attributes:
        published: what the feed published.
        plain: what a reader without knowledge of attempts sees in the stream.
        kept: what `RelayReader` returns; with at-least-once the same as `plain`.
    """

    published: list[int]
    plain: list[int]
    kept: list[int]

    def lost(self) -> set[int]:
        return set(self.published) - set(self.plain)

    @staticmethod
    def in_order(numbers: Sequence[int]) -> bool:
        """Whether the first occurrences of each entity's events are in order."""
        seen = list(dict.fromkeys(numbers))
        return all(
            (mine := [n for n in seen if n % ENTITIES == entity]) == sorted(mine)
            for entity in range(ENTITIES)
        )


class Feed:
    """A feed that grows, and sometimes splits or gets another token."""

    def __init__(self, seed: int) -> None:
        self.publisher = Publisher(2, page_size=150, checkpoint_every=20, seed=seed)
        self.random = random.Random(seed)
        self.count = 0
        self.followers: set[int] = set()

    def grow(self, events: int) -> None:
        for n in range(self.count, self.count + events):
            self.publisher.publish(f"e{n % ENTITIES}", {"entity": f"e{n % ENTITIES}", "n": n})
        self.count += events

    def change(self) -> None:
        # The protocol can't express that a partition takes the cursors of one partition and starts
        # after another: what was split by the first method is always split by it.
        if self.random.random() < 0.5:
            self.publisher.rotate_token()
        elif len(partitions := self.publisher.open_partitions()) < MOST_PARTITIONS:
            partition = self.random.choice(partitions)
            method = METHODS[0] if partition in self.followers else self.random.choice(METHODS)
            children = self.publisher.split(partition, method=method)
            if method == METHODS[0]:
                self.followers.update(children)


async def kill_relay(mode: str, kills: int, seed: int) -> Outcome:
    """Kill the relay several times, let it catch up, and read the stream."""
    feed = Feed(seed)
    with (
        feed.publisher.serve() as url,
        NatsServer() as nats,
        tempfile.TemporaryDirectory() as folder,
    ):
        async with LiftbridgeBroker(nats.url, grpc=True) as broker:
            await broker.create_stream("s", concurrency_control=mode != "at-least-once")
            command = [
                sys.executable,
                "-m",
                "tests.liftbridge.relay_program",
                mode,
                url,
                nats.url,
                broker.address,
                str(Path(folder) / "cursors.db"),
            ]
            for _ in range(kills):
                await _run_and_kill(command, feed, broker, MESSAGES_A_KILL[mode])
            process = _start(command)
            try:
                with anyio.fail_after(SECONDS_TO_CATCH_UP):
                    while (  # noqa: ASYNC110
                        len(set(kept := await _kept(mode, broker))) < feed.count
                        and process.poll() is None
                    ):
                        await asyncio.sleep(0.1)
            finally:
                process.kill()
                process.wait()
            return Outcome(list(range(feed.count)), _plain(broker), kept)


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    return warm.Popen(command)


async def _run_and_kill(
    command: list[str], feed: Feed, broker: LiftbridgeBroker, most: int
) -> None:
    process = _start(command)
    try:
        start = broker.received
        # Between two messages of a batch, between two batches, or at the start.
        target = start + feed.random.choice(
            [1, 2, feed.random.randrange(1, most), feed.random.randrange(1, most)]
        )
        for _ in range(4):
            feed.grow(EVENTS_A_KILL // 4)
            feed.change()
            await asyncio.sleep(0)
        await eventually(lambda: process.poll() is not None or broker.received >= target)
        assert process.poll() is None, "the relay ended by itself"
        # Not a wait for anything: it varies the moment between a message, its ack and the commit.
        await asyncio.sleep(feed.random.random() * 0.05)
    finally:
        process.kill()
        process.wait()


def _plain(broker: LiftbridgeBroker) -> list[int]:
    return [
        orjson.loads(line)["n"]
        for message in broker.messages("s")
        for line in message.value.split(b"\n")
        if line
    ]


async def _kept(mode: str, broker: LiftbridgeBroker) -> list[int]:
    """Return what a reader of that mode gets."""
    if mode == "at-least-once" or not broker.messages("s"):
        return _plain(broker)
    async with LiftbridgeApi(broker.address) as api:
        reader = RelayReader(api, "s", until=broker.next_offset("s") - 1)
        return [event.json()["n"] async for batch in reader for event in batch.events]


def repeated(numbers: Sequence[int]) -> int:
    return len(numbers) - len(set(numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["at-least-once", "batch", "events"], default="events")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    outcome = anyio.run(kill_relay, options.mode, options.kills, seed)
    kept = outcome.kept
    print(
        f"mode {options.mode}, seed {seed}, {options.kills} kills, {len(outcome.published)} events"
    )
    print(
        f"in the stream {len(outcome.plain)}, {repeated(outcome.plain)} of them repeated; "
        f"lost {len(outcome.lost())}"
    )
    print(
        f"read {len(kept)}, {repeated(kept)} of them repeated; in order: {Outcome.in_order(kept)}"
    )


if __name__ == "__main__":
    main()
