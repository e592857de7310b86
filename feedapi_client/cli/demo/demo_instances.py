"""Several instances of the demo's consumer, each a process: they come, go and are killed."""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio

from feedapi_client.cli.demo.demo_consumer import DemoEffects, EventLog
from feedapi_client.errors import FeedError
from feedapi_client.model import FeedKey, Position
from feedapi_client.status import ConsumerStatus, PartitionState, PartitionStatus
from feedapi_client.stores.sqlite import SQLiteCursorStore

_LOOK_SECONDS = 0.1
_REPLACED_AFTER = 0.6
_STOP_SECONDS = 15.0
_PATIENCE = 30.0
"""Seconds without any effect after which the rest counts as lost."""


@dataclass
class Running:
    """One process."""

    name: str
    process: subprocess.Popen[bytes]


class Instances:
    """Keeps so many instances running. For the views it is like a `DemoConsumer`."""

    def __init__(self, log: EventLog, count: int) -> None:
        self.applied = 0
        self.crashes = 0
        self.reading = anyio.Event()
        """Set when one of them reads a partition."""
        self.status: ConsumerStatus | None = None
        """The latest snapshot, of the database, for a view that draws in a thread of its own."""
        self._log = log
        self._count = count
        self._names = 0
        self._requested = 0
        self._disturbances = 0
        self._running: list[Running] = []
        self._leaving: list[Running] = []
        self._starts: list[float] = []
        self._reads: dict[str, list[int]] = {}
        self._command: list[str] = []

    # ------------------------------------------------------------------ what happens to them

    def disturb(self) -> None:
        """Kill one that reads something, or stop it, in turns. Another one is started soon."""
        self._requested += 1

    def _disturb(self, victim: Running) -> None:
        self._requested -= 1
        self._disturbances += 1
        self._running.remove(victim)
        if self._disturbances % 2:
            victim.process.kill()
            victim.process.wait()
            self.crashes += 1
            self._log.add(f"{victim.name} is killed: its leases expire")
        else:
            victim.process.terminate()
            self._log.add(f"{victim.name} stops and gives its partitions away")
            self._leaving.append(victim)
        self._starts.append(anyio.current_time() + _REPLACED_AFTER)

    def _tend(self) -> None:
        """Do what is to be done by now. Raises `RuntimeError` if one ended by itself."""
        victim = next((one for one in self._running if one.name in self._reads), None)
        if self._requested and victim is not None:
            self._disturb(victim)
        now = anyio.current_time()
        while self._starts and self._starts[0] <= now:
            self._starts.pop(0)
            self._start()
        for one in self._running:
            if one.process.poll() is not None:
                raise RuntimeError(f"{one.name} ended with code {one.process.returncode}")

    def _start(self) -> None:
        self._names += 1
        name = f"instance-{self._names}"
        process = subprocess.Popen([*self._command, name])  # noqa: S603 - this very interpreter
        self._running.append(Running(name, process))
        self._log.add(f"{name} starts")

    # ------------------------------------------------------------------ from start to end

    async def run(self, url: str, path: Path, events: int) -> None:
        """Let instances apply so many events, then stop them.

        Raises:
            RuntimeError: an instance ended by itself.
        """
        self._command = [
            sys.executable,
            "-m",
            "feedapi_client.cli.demo.demo_consumer",
            url,
            str(path),
        ]
        effects = DemoEffects(path)
        try:
            for _ in range(self._count):
                self._start()
            async with SQLiteCursorStore(path) as store:
                await self._watch(store, FeedKey(url, "demo"), effects, events)
                await self._stop()
                await self._look(store, FeedKey(url, "demo"), effects)
        finally:
            for one in [*self._running, *self._leaving]:
                one.process.kill()
                one.process.wait()
            effects.close()

    async def _watch(
        self, store: SQLiteCursorStore, key: FeedKey, effects: DemoEffects, events: int
    ) -> None:
        deadline, before = anyio.current_time() + _PATIENCE, -1
        while self.applied < events and anyio.current_time() < deadline:
            if self.applied != before:
                deadline, before = anyio.current_time() + _PATIENCE, self.applied
            self._tend()
            await self._look(store, key, effects)
            await anyio.sleep(_LOOK_SECONDS)

    async def _stop(self) -> None:
        stopping = [*self._running, *self._leaving]
        for one in stopping:
            one.process.terminate()
        with anyio.move_on_after(_STOP_SECONDS):
            while any(one.process.poll() is None for one in stopping):  # noqa: ASYNC110
                await anyio.sleep(_LOOK_SECONDS / 2)

    # ------------------------------------------------------------------ what the database shows

    async def _look(self, store: SQLiteCursorStore, key: FeedKey, effects: DemoEffects) -> None:
        self.applied = effects.count()
        try:
            positions = await store.load(key)
            alive = {found.name for found in await store.instances(key) if found.alive}
            leases = await store.leases(key)
        except FeedError:
            return  # the file is busy: the next look shows it
        owners = {
            p: le.owner for p, le in leases.items() if le.owner is not None and le.owner in alive
        }
        self._log_changes(owners)
        self.status = ConsumerStatus(
            key.url, partitions={p: _status(p, found, owners) for p, found in positions.items()}
        )

    def _log_changes(self, owners: Mapping[int, str]) -> None:
        reads: dict[str, list[int]] = defaultdict(list)
        for partition, owner in sorted(owners.items()):
            if partition >= 0:
                reads[_short(owner)].append(partition)
        if reads:
            self.reading.set()
        for name, partitions in reads.items():
            if set(partitions) - set(self._reads.get(name, ())):
                self._log.add(f"{name} reads {', '.join(map(str, partitions))}")
        self._reads = reads


def _status(partition: int, position: Position, owners: Mapping[int, str]) -> PartitionStatus:
    owner = owners.get(partition)
    if position.status != "open":
        state = PartitionState(position.status)
    else:
        state = PartitionState.WAITING if owner is None else PartitionState.READING
    return PartitionStatus(
        partition=partition,
        state=state,
        cursor=position.cursor,
        owner=None if owner is None else _short(owner),
    )


def _short(owner: str) -> str:
    """Return the name without its random part."""
    return owner.rpartition("-")[0]
