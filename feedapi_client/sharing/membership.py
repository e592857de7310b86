"""One instance among others: its heartbeat, its leases, what it tells, and its callbacks."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Collection, Set

import anyio
from anyio.abc import TaskGroup

from feedapi_client.causes import failure_of
from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, __version__
from feedapi_client.options import Share
from feedapi_client.runtime.iteration import ConsumerSettings, Iteration
from feedapi_client.stores.base import translated
from feedapi_client.stores.leases import Lease, LeaseStore, View

log = logging.getLogger(__name__)

_BEATS_PER_LEASE = 4
_RETRIES_PER_BEAT = 10
_PUT_AT_ONCE = 4096


class Membership:
    """The database decides whether the heartbeat has expired; until it answers, the own clock."""

    def __init__(
        self,
        share: Share,
        store: LeaseStore,
        key: FeedKey,
        name: str,
        options: str,
        *,
        lost: Callable[[str], object],
        failed: Callable[[str], object],
    ) -> None:
        self.joined = False
        self.expired = 0
        self._seconds = share.lease_seconds
        self._store = store
        self._key = key
        self._name = name
        self._options = options
        self._lost = lost
        self._failed = failed
        self._deadline = 0.0
        self._changed = anyio.Event()

    async def look(self, last: View | None = None) -> View:
        looking = self._store.look(self._key, last)
        return await translated(looking, "looking at the leases", self._key.url)

    async def put(self, leases: Collection[Lease]) -> set[int]:
        put: set[int] = set()
        ordered = sorted(leases, key=lambda lease: lease.partition)
        # In parts, so that a heartbeat comes in between where one writes at a time, as in SQLite.
        for start in range(0, len(ordered), _PUT_AT_ONCE):
            some = ordered[start : start + _PUT_AT_ONCE]
            putting = self._store.put(self._key, self._name, some)
            put |= await translated(putting, "writing leases", self._key.url)
        return put

    async def leave(self) -> None:
        self.joined = False
        self._changed = anyio.Event()
        await translated(self._store.leave(self._key, self._name), "leaving", self._key.url)

    async def beat(self) -> None:
        sent = anyio.current_time()
        beating = self._store.beat(self._key, self._name, self._seconds, self._options)
        if not await translated(beating, "writing the heartbeat", self._key.url):
            self._expire("its heartbeat has expired")
        self._deadline = max(self._deadline, sent + self._seconds)
        self.joined = True
        self._changed.set()

    async def wait_until_joined(self) -> None:
        await self._changed.wait()

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            while True:
                pause = self._seconds / _BEATS_PER_LEASE
                try:
                    await self.beat()
                except StoreError as error:
                    self._failed(f"the heartbeat is not written: {error}")
                    pause /= _RETRIES_PER_BEAT
                await anyio.sleep(pause * random.uniform(0.8, 1.0))

    async def _watch(self) -> None:
        """Stop reading by the own clock, although the database may not answer at all."""
        while True:
            if anyio.current_time() >= self._deadline:
                self._expire("its heartbeat could not be written in time")
            pause = self._deadline - anyio.current_time() if self.joined else self._seconds
            await anyio.sleep(max(pause, self._seconds / 100))

    def _expire(self, why: str) -> None:
        if self.joined:
            self.joined = False
            self.expired += 1
            self._lost(why)


def published_options(settings: ConsumerSettings) -> str:
    chosen = settings.partitions
    options = {
        "follow": int(settings.follow),
        "ordered": int(settings.ordered),
        "partitions": "all" if chosen is None else _digest(sorted(chosen)),
        "lineage": _digest(sorted(settings.lineage.items())),
        "version": __version__,
    }
    return " ".join(f"{name}={value}" for name, value in options.items())[:200]


def different_options(one: str, other: str) -> list[str]:
    mine, theirs = (
        dict(part.split("=", 1) for part in options.split() if "=" in part)
        for options in (one, other)
    )
    return [name for name in mine if name in theirs and mine[name] != theirs[name]]


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


class Callbacks:
    """Calls `Share.on_assigned` and `on_release` in tasks: no lease waits for them."""

    def __init__(self, share: Share, iteration: Iteration, changed: Callable[[], object]) -> None:
        self._share = share
        self._iteration = iteration
        self._changed = changed
        self._tasks: TaskGroup | None = None
        self._assigning: dict[int, frozenset[int]] = {}
        """With what `on_assigned` was called last, of those for which it has not returned."""
        self._told: set[int] = set()
        """`on_assigned` was called, and `on_release` was not."""
        self._releasing: set[int] = set()

    @property
    def arriving(self) -> Set[int]:
        """Partitions not read yet: `on_assigned` has not returned since they were last claimed."""
        return self._assigning.keys()

    def use(self, tasks: TaskGroup) -> None:
        self._tasks = tasks

    def assign(self, partitions: Collection[int]) -> None:
        if self._share.on_release is not None:
            self._told.update(partitions)
        if self._share.on_assigned is not None and self._tasks is not None:
            call = frozenset(partitions)
            self._assigning |= dict.fromkeys(call, call)
            self._tasks.start_soon(self._assign, call)

    async def _assign(self, partitions: frozenset[int]) -> None:
        assert self._share.on_assigned is not None
        try:
            await self._share.on_assigned(partitions)
        except BaseException as error:  # noqa: BLE001 - the application's, raised by its iteration
            self._iteration.fail(failure_of(error, "on_assigned", own_task=True))
            return
        # One that was lost and claimed again meanwhile waits for the later call.
        self._assigning = {p: call for p, call in self._assigning.items() if call is not partitions}
        self._changed()

    def is_over(self, partition: int) -> bool:
        """Whether the application has let go of the partition, so that it can be given away."""
        pending = (self.arriving, self._told, self._releasing)
        return not any(partition in those for those in pending)

    def release(self, partitions: Collection[int]) -> None:
        told = frozenset(self._told.intersection(partitions) - self.arriving)
        if told and self._tasks is not None:
            self._told -= told
            self._releasing |= told
            self._tasks.start_soon(self._release, told)

    async def _release(self, partitions: frozenset[int]) -> None:
        assert self._share.on_release is not None
        seconds = self._share.handover_seconds
        scope = anyio.move_on_after(seconds)
        try:
            with scope:
                await self._share.on_release(partitions)
        except BaseException as error:
            failed = failure_of(error, "on_release", own_task=True)
            log.exception("feed %s: on_release failed", self._iteration.feed)
            self._iteration.report(None, f"on_release failed with {type(failed).__name__}")
        if scope.cancelled_caught:
            self._iteration.report(None, f"on_release has not returned within {seconds:g} s")
        self._releasing -= partitions
        self._changed()

    def forget(self, partitions: Collection[int]) -> None:
        for partition in partitions:
            self._assigning.pop(partition, None)
        self.release(partitions)

    async def leave(self) -> None:
        """Call `on_release` with all that is left, at the end. It is not cancelled meanwhile."""
        left = frozenset(self._told | self._releasing)
        self._told.clear()
        if left:
            with anyio.CancelScope(shield=True):
                await self._release(left)
