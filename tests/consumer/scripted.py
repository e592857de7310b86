"""A feed that answers as one is told, on virtual time: publishers and gateways of the field.

The events of partition p are numbered from 0; the cursor behind the first n of them is ``str(n)``.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from feedapi_client import FeedConsumer, RetryPolicy

URL = "http://feed/feed"
MAINTENANCE = b'{"status":"maintenance"}\n'


@dataclass
class Ask:
    """One request: `partition` is None for a discovery; `at` are seconds since the feed began."""

    at: float
    partition: int | None = None
    cursor: str = ""
    params: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Listed:
    """One partition: what discovery says, and how many events each replica has."""

    events: int = 0
    closed: bool = False
    starts_after: int | None = None


Answer = Callable[["Scripted", Ask], httpx.Response | None]
"""Answers a request in place of the publisher; None leaves it to the publisher."""


class Scripted:
    """A publisher of dialect v2-token that never sends `lastCursor`, as the one in Go does.

    Arguments:
        echo: whether an empty page holds the cursor asked with.
        page: events of a page.
        every: events between two checkpoints; None: one checkpoint a page.
        answers: are asked first.
    """

    def __init__(
        self,
        partitions: dict[int, Listed],
        *answers: Answer,
        echo: bool = False,
        page: int = 100,
        every: int | None = None,
    ):
        self.partitions = partitions
        self.echo = echo
        self.page = page
        self.every = every
        self.asks: list[Ask] = []
        self.answers = [*answers]
        self.refused = 0
        """How often `answers` refused a request."""
        self.seen: list[tuple[int, int]] = []
        """What `following` has read: partition and number of each event."""
        self._began: float | None = None

    @property
    def everything(self) -> list[tuple[int, int]]:
        return [(id, n) for id, each in self.partitions.items() for n in range(each.events)]

    @property
    def fetches(self) -> list[Ask]:
        return [ask for ask in self.asks if ask.partition is not None]

    def first_fetch(self, partition: int, cursor: str) -> float | None:
        """When the partition was asked from the cursor for the first time."""
        return next(
            (a.at for a in self.asks if (a.partition, a.cursor) == (partition, cursor)), None
        )

    def discovery(self) -> httpx.Response:
        listed = []
        for id, each in self.partitions.items():
            one: dict[str, Any] = {"id": str(id)}
            if each.closed:
                one["closed"] = True
            if each.starts_after is not None:
                one["startsAfterPartition"] = str(each.starts_after)
            listed.append(one)
        return httpx.Response(200, json={"token": "t", "partitions": listed})

    def fetch(self, ask: Ask, *, visible: int | None = None) -> httpx.Response:
        """The page of a replica that has only the first `visible` events of the partition."""
        assert ask.partition is not None
        events = self.partitions[ask.partition].events
        events = events if visible is None else min(visible, events)
        start = {"_first": 0, "_last": events}.get(ask.cursor)
        start = int(ask.cursor) if start is None else start
        numbers = range(start, min(events, start + self.page))
        lines = []
        for n in numbers:
            lines.append(json.dumps({"data": {"p": ask.partition, "n": n}}))
            if self.every is not None and (n + 1) % self.every == 0 and n != numbers[-1]:
                lines.append(json.dumps({"cursor": str(n + 1)}))
        if lines:
            lines.append(json.dumps({"cursor": str(numbers[-1] + 1)}))
        elif self.echo:
            lines.append(json.dumps({"cursor": ask.cursor}))
        return httpx.Response(200, content="".join(f"{line}\n" for line in lines).encode())

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        await anyio.sleep(0.001)
        now = anyio.current_time()
        self._began = now if self._began is None else self._began
        params = dict(request.url.params)
        ask = Ask(now - self._began, params=params)
        if "partition" in params:
            ask = Ask(now - self._began, int(params["partition"]), params["cursor"], params)
        self.asks.append(ask)
        for answer in self.answers:
            if (response := answer(self, ask)) is not None:
                self.refused += response.is_error
                return response
        return self.discovery() if ask.partition is None else self.fetch(ask)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self))

    def consumer(self, **options: Any) -> FeedConsumer:
        options = {"retry": RetryPolicy(), "follow": False, **options}
        return FeedConsumer(URL, **{"http": self.client(), **options})

    async def read(self, **options: Any) -> list[tuple[int, int]]:
        """What a consumer reads that begins now, up to the end of the feed."""
        return await read_all(self.consumer(**options))

    @asynccontextmanager
    async def following(self, **options: Any) -> AsyncIterator[FeedConsumer]:
        """A consumer that follows the feed during the block. `seen` gets what it reads."""
        consumer = self.consumer(**{"follow": True, **options})

        async def follow() -> None:
            async for event in consumer:
                self.seen.append((event.partition, event.json()["n"]))

        async with consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            yield consumer
            tasks.cancel_scope.cancel()


def split(generations: int, events: int) -> dict[int, Listed]:
    """A history of closed generations, each the child of the one before, and an open last one."""
    return {
        id: Listed(events, id < generations, id - 1 if id else None)
        for id in range(generations + 1)
    }


def cursor(place: int | str) -> httpx.Response:
    """A page that holds a cursor alone."""
    return httpx.Response(200, content=f'{{"cursor":"{place}"}}\n'.encode())


def of_fetches(answer: Callable[[Ask], httpx.Response | None]) -> Answer:
    """Answers fetches only."""
    return lambda _, ask: None if ask.partition is None else answer(ask)


def answers_for(
    seconds: float, response: Callable[[], httpx.Response], *, after: int = 1
) -> Answer:
    """A gateway that answers everything itself for so long, from the fetch number `after` on."""
    began: list[float] = []

    def answer(feed: Scripted, ask: Ask) -> httpx.Response | None:
        if not began and len(feed.fetches) > after:
            began.append(ask.at)
        return response() if began and ask.at < began[0] + seconds else None

    return answer


def lags(seconds: float, visible: int, *, partition: int = 0) -> Answer:
    """A replica that has only the first events for so long after its first answer."""
    began: list[float] = []

    def answer(feed: Scripted, ask: Ask) -> httpx.Response | None:
        if ask.partition != partition:
            return None
        began[:] = began or [ask.at]
        return feed.fetch(ask, visible=visible) if ask.at < began[0] + seconds else None

    return answer


async def read_all(consumer: FeedConsumer, within: float = 1000.0) -> list[tuple[int, int]]:
    """Every event up to the end of the feed, as (partition, number)."""
    async with consumer:
        with anyio.fail_after(within):
            return [(e.partition, e.json()["n"]) async for e in consumer]
