"""Kill a relay and what it needs, on real brokers, while a reader follows the stream.

A long run: ``python -m tests.liftbridge.kill_real --mode events --what leader --kills 20``. The
modes are at-least-once, batch and events. What is killed: the relay (SIGKILL), the broker (SIGINT,
on which it shuts down, SIGTERM or SIGKILL), NATS, the leader of three brokers, or two leaders of
three within seconds.

Brokers may then lose messages that they acked. Exactly once, relay and reader then
end with `StreamGapError`: the relay is started again, and the reader at the offset of the error,
after what it read from there on was undone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import orjson

from feedapi_client.liftbridge import LiftbridgeApi, RelayReader, StreamGapError
from feedapi_client.liftbridge.subscription import Start
from feedapi_client.testing import Publisher
from feedapi_client.testing.liftbridge import LiftbridgeServer, NatsServer
from feedapi_client.testing.publisher import SplitMethod
from tests import warm
from tests.liftbridge.broker import (
    FAILOVER_SECONDS,
    FAILOVER_SETTINGS,
    in_sync_leader,
)
from tests.liftbridge.helpers import eventually
from tests.liftbridge.relay_program import LOST

MODES = ("at-least-once", "batch", "events")
LEADERS = {"leader": 1, "two-leaders": 2}
SIGNALS = {"broker-int": signal.SIGINT, "broker-term": signal.SIGTERM}
"""How many leaders of three brokers die at a time."""
WHAT = ("relay", "broker-int", "broker-term", "broker-kill", "nats", *LEADERS)
EVENTS_A_KILL = 200
ENTITIES = 20
MOST_PARTITIONS = 12
METHODS: tuple[SplitMethod, ...] = ("starts-after", "cursor-from")
ACK_TIMEOUT = "1"


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


class KillRun:
    """One run: a feed, NATS, brokers, a relay in a process of its own, and a reader."""

    def __init__(self, mode: str, what: str, seed: int) -> None:
        self.mode, self.what = mode, what
        self.feed = Feed(seed)
        self.random = self.feed.random
        self.nats = NatsServer()
        self.found: list[int] = []
        self.batches: list[tuple[int, int]] = []
        self.relays_told = self.readers_told = 0

    async def run(self, kills: int) -> Outcome:
        """Kill so many times, let everything catch up, and return what the reader got."""
        nodes = 3 if self.what in LEADERS else 1
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            url = stack.enter_context(self.feed.publisher.serve())
            stack.enter_context(self.nats)
            self.server = stack.enter_context(
                LiftbridgeServer(self.nats.url, nodes=nodes, settings=FAILOVER_SETTINGS)
            )
            self.api = await stack.enter_async_context(LiftbridgeApi(self.server.addresses))
            await self.api.create_stream(
                "s", concurrency_control=self.mode != "at-least-once", replication_factor=nodes
            )
            addresses = ",".join(self.server.addresses)
            store = str(Path(folder) / "cursors.db")
            self.command = [sys.executable, "-m", "tests.liftbridge.relay_program", self.mode]
            self.command += [url, self.nats.url, addresses, store, ACK_TIMEOUT]
            self._start_relay()
            stack.callback(self._kill_relay)
            reader = asyncio.create_task(self._follow())
            try:
                await self._kill_often(kills, reader)
            except BaseException:
                for node in range(nodes):
                    print(f"the log of node {node}:\n{self.server.log(node)[-6000:]}")
                raise
            finally:
                reader.cancel()
                await asyncio.wait([reader])
            return Outcome(list(range(self.feed.count)), await self._plain(), self._kept())

    async def _plain(self) -> list[int]:
        """Return all events in the stream, those of interrupted attempts, too."""
        messages = self.api.subscribe("s", until="latest")
        values = [message.value async for message in messages]
        return [orjson.loads(line)["n"] for value in values for line in value.split(b"\n") if line]

    def _kept(self) -> list[int]:
        """Return all events that the reader got; at least once, each where it was seen last.

        A message that is lost comes again with all after it: the order holds for the last time.
        """
        return self.found if self.mode != "at-least-once" else _last_of_each(self.found)

    async def _kill_often(self, kills: int, reader: asyncio.Task[None]) -> None:
        for _ in range(kills):
            target = len(self.found) + self.random.randrange(1, EVENTS_A_KILL)
            self.feed.grow(EVENTS_A_KILL)
            if self.random.random() < 0.3:
                self.feed.change()
            await self._wait_for(target, reader)
            # Not a wait for anything: it varies the moment between a message, its ack, the commit.
            await asyncio.sleep(self.random.random() * 0.05)
            await self._kill()
        # What was stored right before a kill is hidden until something is appended.
        self.feed.grow(1)
        deadline = anyio.current_time() + FAILOVER_SECONDS
        while len(set(self.found)) < self.feed.count:
            state = await self.api.partition_metadata("s")
            missing = self.feed.count - len(set(self.found))
            if anyio.current_time() >= deadline:
                raise AssertionError(
                    f"{missing} missing: {state}, {await self._describe_missing()}"
                )
            self._check_running(reader)
            await asyncio.sleep(0.1)

    async def _describe_missing(self) -> str:
        """Say of each missing event at which offsets a new subscription finds it."""
        missing = sorted(set(range(self.feed.count)) - set(self.found))
        offsets: dict[int, list[int]] = {n: [] for n in missing}
        async for message in self.api.subscribe("s", until="latest", idle_timeout=10):
            for line in filter(None, message.value.split(b"\n")):
                offsets.get(orjson.loads(line)["n"], []).append(message.offset)
        return f"in the stream {offsets}, read last {self.found[-5:]}"

    async def _wait_for(self, target: int, reader: asyncio.Task[None]) -> None:
        def reached() -> bool:
            self._check_running(reader)
            return len(self.found) >= target

        await eventually(reached, FAILOVER_SECONDS)

    def _check_running(self, reader: asyncio.Task[None]) -> None:
        """Start a relay again that ended because the broker lost messages. No other may end."""
        assert not reader.done(), f"the reader ended: {reader.exception()}"
        if self.relay.poll() == LOST:
            self.relays_told += 1
            self._start_relay()
        assert self.relay.poll() is None, "the relay ended by itself"

    async def _kill(self) -> None:
        if self.what == "relay":
            self._kill_relay()
            self._start_relay()
        elif self.what == "nats":
            await anyio.to_thread.run_sync(self.nats.restart)
        elif self.what in LEADERS:
            for _ in range(LEADERS[self.what]):
                await self._kill_leader()
        else:
            number = SIGNALS.get(self.what, signal.SIGKILL)
            await anyio.to_thread.run_sync(self.server.kill, 0, number)
            await anyio.to_thread.run_sync(self.server.start)

    async def _kill_leader(self) -> None:
        """Kill the leader, and start it again when another node leads, so that it does not."""
        node = await in_sync_leader(self.server, self.api, "s")
        await anyio.to_thread.run_sync(self.server.kill, node)
        await eventually_leads(self.api, self.server, node)
        await anyio.to_thread.run_sync(self.server.start, node)

    def _start_relay(self) -> None:
        self.relay = warm.Popen(self.command)

    def _kill_relay(self) -> None:
        self.relay.kill()
        self.relay.wait()

    async def _follow(self) -> None:
        if self.mode == "at-least-once":
            async for message in self.api.subscribe("s"):
                self.found.append(orjson.loads(message.value)["n"])
        start: int | None = None
        while True:
            try:
                await self._follow_batches("earliest" if start is None else start)
            except StreamGapError as error:
                self.readers_told += 1
                start = error.offset
                self._undo_from(start)

    async def _follow_batches(self, start: Start) -> None:
        async for batch in RelayReader(self.api, "s", start=start):
            self.found.extend(event.json()["n"] for event in batch.events)
            self.batches.append((batch.next_offset, len(batch.events)))

    def _undo_from(self, offset: int) -> None:
        """Forget the batches that the broker lost a part of."""
        while self.batches and self.batches[-1][0] > offset:
            _, count = self.batches.pop()
            del self.found[len(self.found) - count :]


def repeated(numbers: Sequence[int]) -> int:
    return len(numbers) - len(set(numbers))


def _last_of_each(numbers: list[int]) -> list[int]:
    return list(dict.fromkeys(reversed(numbers)))[::-1]


async def eventually_leads(api: LiftbridgeApi, server: LiftbridgeServer, dead: int) -> None:
    """Wait until another node than the dead one leads the stream."""
    with anyio.fail_after(FAILOVER_SECONDS):
        while True:
            leader = (await api.metadata("s")).partitions[0].leader
            if leader and server.node_of(leader) != dead:
                return
            await asyncio.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES, default="events")
    parser.add_argument("--what", choices=WHAT, default="broker-kill")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    run = KillRun(options.mode, options.what, seed)
    outcome = anyio.run(run.run, options.kills)
    print(
        f"mode {options.mode}, seed {seed}, "
        f"{options.kills} times {options.what}: "
        f"{len(outcome.published)} events, lost {len(outcome.lost())}, "
        f"repeated {repeated(outcome.plain)}, in order: {Outcome.in_order(outcome.kept)}, "
        f"panics of a starting broker {run.server.panics}, "
        f"losses of the broker that relays {run.relays_told} and readers {run.readers_told} told"
    )


if __name__ == "__main__":
    main()
