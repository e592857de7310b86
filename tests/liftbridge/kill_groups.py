"""Kill members of a consumer group at random, on a real broker.

A long run: ``python -m tests.liftbridge.kill_groups --kills 20``. Each message has to be handled by
a member at least once, whoever dies.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio

from feedapi_client.liftbridge import LiftbridgeApi, LiftbridgePublisher, Stream
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer
from tests import warm
from tests.liftbridge.broker import SETTINGS

STREAM = Stream("s", partitions=4)
MEMBERS = 3
MESSAGES_A_KILL = 40
_SECONDS = 180.0


class GroupRun:
    """One run: a broker, a stream, and members in processes of their own."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.published = 0
        self.members: list[subprocess.Popen[bytes]] = []

    async def run(self, kills: int) -> tuple[int, int, int]:
        """Kill so often. Return how many messages there were, were missed, and came again."""
        settings = {**SETTINGS, "streams.segment.max.bytes": 1 << 20}
        with (
            tempfile.TemporaryDirectory() as folder,
            NatsServer() as nats,
            LiftbridgeServer(nats.url, settings=settings) as server,
        ):
            async with (
                LiftbridgeApi(server.address) as api,
                LiftbridgePublisher(nats.url, ack_timeout=30) as publisher,
            ):
                await api.create_stream(STREAM)
                try:
                    return await self._kill_often(kills, publisher, server.address, Path(folder))
                finally:
                    for member in self.members:
                        member.kill()
                        member.wait()

    async def _kill_often(
        self, kills: int, publisher: LiftbridgePublisher, address: str, folder: Path
    ) -> tuple[int, int, int]:
        log = folder / "handled"
        for _ in range(MEMBERS):
            self._start(address, log)
        for _ in range(kills):
            values = [b"%d" % (self.published + n) for n in range(MESSAGES_A_KILL)]
            for partition in range(STREAM.partitions):
                part = values[partition :: STREAM.partitions]
                await publisher.publish_many(STREAM, part, partition=partition)
            self.published += len(values)
            await asyncio.sleep(self.random.random() * 3)
            victim = self.members.pop(self.random.randrange(len(self.members)))
            victim.kill()
            victim.wait()
            self._start(address, log)
        with anyio.move_on_after(_SECONDS):
            while len(set(_handled(log))) < self.published:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        handled = _handled(log)
        missed = self.published - len(set(handled))
        return self.published, missed, len(handled) - len(set(handled))

    def _start(self, address: str, log: Path) -> None:
        command = [sys.executable, "-m", "tests.liftbridge.kill_groups", "--member", address]
        self.members.append(warm.Popen([*command, "--log", str(log)]))


def _handled(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().splitlines()] if log.exists() else []


async def member(address: str, log: str) -> None:
    """Handle messages: write each one's number down, in one write."""
    async with LiftbridgeApi(address) as api:
        consumer = api.group_consumer("g", [STREAM.name], checkpoint_seconds=0.5)
        with Path(log).open("ab", buffering=0) as file:  # noqa: ASYNC230
            async with consumer:
                async for message in consumer:
                    file.write(message.value + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--member", help=argparse.SUPPRESS)
    parser.add_argument("--log", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.member:
        anyio.run(member, options.member, options.log)
        return
    seed = random.randrange(2**32) if options.seed is None else options.seed
    published, missed, again = anyio.run(GroupRun(seed).run, options.kills)
    print(
        f"seed {seed}, {options.kills} members of {MEMBERS} killed: {published} messages, "
        f"missed {missed}, handled again {again}"
    )
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
