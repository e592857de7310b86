"""What happens in ``feedapi demo``, apart from showing it."""

from __future__ import annotations

import logging
import sqlite3
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec

from feedapi_client.cli.demo.proof import Step, Verdict, prove
from feedapi_client.consumer import FeedConsumer
from feedapi_client.model import Batch, DialectName, Partition
from feedapi_client.options import Limits, RetryPolicy
from feedapi_client.status import ConsumerStatus
from feedapi_client.stores.sqlite import SQLiteCursorStore
from feedapi_client.testing import Publisher, faults

_ENTITIES = 200
_TICK = 0.02
_PAGE_SIZE = 150
_CHECKPOINT_EVERY = 10
# Small and quick, so that a few seconds hold many batches.
_LIMITS = Limits(
    poll_interval=0.02, max_poll_interval=0.1, discovery_interval=0.25, max_batch_bytes=8 * 1024
)
_RETRY = RetryPolicy(base_delay=0.02, max_delay=0.2)
_PRESENT = 1000


class Crash(Exception):  # noqa: N818 - it is no error here
    """The consumer dies."""


class Order(msgspec.Struct):
    """A payload of the demo."""

    entity: str
    n: int


class Effects:
    """What the application has done: one row for each event that it handled, in the same file as the cursors."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=OFF")
        self.connection.execute(
            "CREATE TABLE effects (row INTEGER PRIMARY KEY AUTOINCREMENT, entity TEXT NOT NULL, n INTEGER NOT NULL)"
        )
        self.count = 0

    def add(self, batch: Batch) -> None:
        """One row for each event, within the transaction that is open."""
        orders = [event.decode(Order) for event in batch.events]
        self.connection.executemany(
            "INSERT INTO effects (entity, n) VALUES (?, ?)",
            [(order.entity, order.n) for order in orders],
        )

    def steps(self) -> list[Step]:
        """In the order in which they were made."""
        return list(self.connection.execute("SELECT entity, n FROM effects ORDER BY row"))


class Demonstration:
    """One run: a publisher with a programme of events, and a consumer that dies now and then."""

    def __init__(
        self,
        *,
        dialect: DialectName,
        events: int,
        seconds: float,
        crashes: int = 4,
        seed: int | None = None,
        sabotage: str | None = None,
    ) -> None:
        self.publisher = Publisher(
            2,
            dialect=dialect,
            page_size=_PAGE_SIZE,
            checkpoint_every=_CHECKPOINT_EVERY,
            vary=True,
            seed=seed,
        )
        self.events = events
        self.seconds = seconds
        self.sabotage = sabotage
        self.published = 0
        self.applied = 0
        self.crashes = 0
        self.happenings: deque[tuple[float, str]] = deque(maxlen=_PRESENT)
        self.on_happening: Callable[[float, str], None] | None = None
        self.seen: dict[int, Partition] = {}
        self.status: ConsumerStatus | None = None
        self.began = time.monotonic()
        self.url = ""
        self._crash_due = 0
        self._fed = False
        self._consumer: FeedConsumer | None = None
        self._programme = sorted(
            [
                *self._topology(),
                *[((k + 0.6) / (crashes + 0.5), self._ask_for_crash) for k in range(crashes)],
            ],
            key=lambda item: item[0],
        )

    def _topology(self) -> list[tuple[float, Callable[[], None]]]:
        return [
            (0.12, self._rotate),
            (0.25, lambda: self._split(0, "starts-after")),
            (0.38, self._fail),
            (0.5, lambda: self._split(1, "cursor-from")),
            (0.62, self._rotate),
            (0.72, lambda: self._split(4, "starts-after")),
            (0.8, self._break_off),
            (0.88, self._rotate),
        ]

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    def note(self, text: str) -> None:
        """Something happened."""
        self.happenings.append((self.elapsed, text))
        if self.on_happening is not None:
            self.on_happening(self.elapsed, text)

    async def run(self) -> Verdict:
        """All of it. Raises `FeedError` where the consumer does."""
        log = logging.getLogger("feedapi_client")
        handler, propagate, log.propagate = _Notes(self), log.propagate, False
        log.addHandler(handler)
        try:
            with (
                tempfile.TemporaryDirectory(prefix="feedapi-demo-") as directory,
                self.publisher.serve() as url,
            ):
                self.began, self.url = time.monotonic(), url
                self._look()
                self.note(f"a publisher serves partitions 0 and 1 ({self.publisher.dialect})")
                return await self._run(url, Path(directory, "demo.db"))
        finally:
            log.removeHandler(handler)
            log.propagate = propagate

    async def _run(self, url: str, path: Path) -> Verdict:
        effects = Effects(path)
        try:
            async with SQLiteCursorStore(path) as store, anyio.create_task_group() as tasks:
                tasks.start_soon(self._feed)
                while not self._fed:
                    await self._live(url, store, effects, follow=True)
                while await self._live(url, store, effects, follow=False):
                    pass
            published = [(order["entity"], order["n"]) for order in self.publisher.payloads()]
            return prove(published, effects.steps())
        finally:
            effects.connection.close()

    # ------------------------------------------------------------------ the consumer

    async def _live(
        self, url: str, store: SQLiteCursorStore, effects: Effects, *, follow: bool
    ) -> bool:
        """One life of the consumer; True when it ended in a crash."""
        try:
            async with FeedConsumer(
                url, store=store, name="demo", follow=follow, limits=_LIMITS, retry=_RETRY
            ) as consumer:
                self._consumer = consumer
                if self._fed and follow:
                    return False
                async for batch in consumer.batches():
                    await self._handle(batch, effects)
        except Crash:
            self.crashes += 1
            self.note(
                f"crash {self.crashes}: the consumer died in the middle of a batch, another one starts from the store"
            )
            return True
        finally:
            self.look()
            self._consumer = None
        return False

    async def _handle(self, batch: Batch, effects: Effects) -> None:
        crash = self._crash_due > 0 and len(batch.events) > 0
        if crash:
            self._crash_due -= 1
        if self.sabotage is None:
            await self._in_one_transaction(batch, effects, crash)
        else:
            await self._in_two(batch, effects, crash)
        self.applied += len(batch.events)

    async def _in_one_transaction(self, batch: Batch, effects: Effects, crash: bool) -> None:
        connection = effects.connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            effects.add(batch)
            if crash and self.crashes % 2 == 0:
                raise Crash
            await batch.commit(transaction=connection)
            if crash:
                raise Crash
            connection.execute("COMMIT")
        except BaseException:
            connection.execute("ROLLBACK")
            raise

    async def _in_two(self, batch: Batch, effects: Effects, crash: bool) -> None:
        """How it is not to be done."""
        if self.sabotage == "cursor-first":
            await batch.commit()
        else:
            effects.add(batch)
        if crash:
            raise Crash
        if self.sabotage == "cursor-first":
            effects.add(batch)
        else:
            await batch.commit()

    # ------------------------------------------------------------------ the publisher

    async def _feed(self) -> None:
        began = anyio.current_time()
        while self.published < self.events:
            await anyio.sleep(_TICK)
            share = min(1.0, (anyio.current_time() - began) / self.seconds)
            # Up to the next item of the programme and no further, however late this is.
            while self._programme and self._programme[0][0] <= share:
                at, act = self._programme.pop(0)
                self._publish(int(self.events * at))
                act()
            self._publish(int(self.events * share))
            self.look()
        self._fed = True
        self.note(f"{self.published:,} events are published: the consumer reads to the end")
        if self._consumer is not None:
            self._consumer.stop()

    def _publish(self, upto: int) -> None:
        for number in range(self.published, upto):
            entity = f"entity-{number % _ENTITIES}"
            self.publisher.publish(entity, {"entity": entity, "n": number // _ENTITIES + 1})
        self.published = max(self.published, upto)

    def _split(self, partition: int, method: str) -> None:
        children = self.publisher.split(
            partition, method="starts-after" if method == "starts-after" else "cursor-from"
        )
        self._look()
        what = (
            "start after it"
            if method == "starts-after"
            else "take over its cursor and its whole history"
        )
        self.note(f"partition {partition} was split: {' and '.join(map(str, children))} {what}")

    def _rotate(self) -> None:
        self.publisher.rotate_token()
        self.note("the token was rotated: the consumer has to discover again")

    def _fail(self) -> None:
        self.publisher.fail(503, times=4)
        self.note("the next four fetches are answered 503")

    def _break_off(self) -> None:
        self.publisher.fail(faults.Truncate(after_lines=15), times=2)
        self.note("the next two responses break off in the middle of a line")

    def _ask_for_crash(self) -> None:
        self._crash_due += 1

    def _look(self) -> None:
        self.seen |= self.publisher.partitions

    def look(self) -> None:
        """Take a snapshot of the consumer for the view."""
        if self._consumer is not None:
            self.status = self._consumer.status()


class _Notes(logging.Handler):
    """Turns the library's warnings into happenings."""

    def __init__(self, show: Demonstration) -> None:
        super().__init__(logging.WARNING)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        where = f"feed {self._show.url}"
        self._show.note(message.removeprefix(where).lstrip(":, "))
