"""A feed behind a gateway that limits requests, in virtual time, and how a consumer fares there."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import anyio
import httpx

from feedapi_client import FeedConsumer, FeedError
from feedapi_client.testing import Publisher
from tests.consumer.helpers import n_of, numbers
from tests.simulation.clock import Backend, run_in_virtual_time

LATENCY = 0.02
"""Mean seconds of an answer."""


class Gateway:
    """Lets requests pass, or refuses them with a status and perhaps a Retry-After."""

    status = 429

    def passes(self, now: float, under_way: int) -> bool:
        """Decide on a request. `under_way`: how many passed and are not answered yet."""
        return False

    def retry_after(self, now: float) -> float | None:
        """Return the value of the header Retry-After; None: none is sent."""
        return None


@dataclass
class TokenBucket(Gateway):
    """So many requests a second, and a number of them at once after a pause (nginx, Envoy)."""

    rate: float
    burst: float = 1.0
    status: int = 429
    says: bool = False
    """Whether a Retry-After says when the next request would pass, in whole seconds."""
    _tokens: float = field(default=math.nan, init=False)
    _at: float = field(default=0.0, init=False)

    def passes(self, now: float, under_way: int) -> bool:
        before = self.burst if math.isnan(self._tokens) else self._tokens
        self._tokens, self._at = min(self.burst, before + (now - self._at) * self.rate), now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def retry_after(self, now: float) -> float | None:
        return math.ceil((1.0 - self._tokens) / self.rate) if self.says else None


@dataclass
class FixedWindow(Gateway):
    """A number of requests in each period, and nothing until the next one begins."""

    requests: int
    seconds: float
    status: int = 429
    says: bool = True
    _period: int = field(default=-1, init=False)
    _passed: int = field(default=0, init=False)

    def passes(self, now: float, under_way: int) -> bool:
        period = int(now // self.seconds)
        if period != self._period:
            self._period, self._passed = period, 0
        if self._passed >= self.requests:
            return False
        self._passed += 1
        return True

    def retry_after(self, now: float) -> float | None:
        return math.ceil(self.seconds - now % self.seconds) if self.says else None


@dataclass
class AtOnce(Gateway):
    """A number of requests at the same time (nginx's limit_conn)."""

    most: int
    status: int = 429

    def passes(self, now: float, under_way: int) -> bool:
        return under_way < self.most


class LimitedTransport(httpx.AsyncBaseTransport):
    """The publisher's ASGI application behind the gateway."""

    def __init__(self, publisher: Publisher, gateway: Gateway, latency: float) -> None:
        self._app = httpx.ASGITransport(publisher.asgi)
        self.gateway: Gateway | None = gateway
        self._latency = latency
        self._random = Random(1)
        self._under_way = 0
        self.granted: list[tuple[float, int | None]] = []
        """When, and of which partition. None: a discovery."""
        self.refused: list[tuple[float, int | None]] = []
        self.refuses: set[int | None] | None = None
        """The partitions that the gateway looks at; None: all."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        gateway, now = self.gateway, anyio.current_time()
        asked = request.url.params.get("partition")
        entry = now, None if asked is None else int(asked)
        concerned = self.refuses is None or entry[1] in self.refuses
        if gateway is not None and concerned and not gateway.passes(now, self._under_way):
            self.refused.append(entry)
            seconds = gateway.retry_after(now)
            headers = {} if seconds is None else {"retry-after": f"{seconds:g}"}
            await anyio.sleep(self._latency / 4)
            return httpx.Response(gateway.status, headers=headers, content=b"slow down\n")
        self.granted.append(entry)
        self._under_way += 1
        try:
            await anyio.sleep(self._latency * self._random.uniform(0.5, 1.5))
            return await self._app.handle_async_request(request)
        finally:
            self._under_way -= 1


@dataclass
class Fared:
    """How a consumer fared."""

    granted: int
    refused: int
    seconds: float
    events: int
    error: FeedError | None
    waited: float
    """The longest time between two answers to a partition."""

    @property
    def ratio(self) -> float:
        """Refused requests for each granted one."""
        return self.refused / max(self.granted, 1)


def consume_behind(
    gateway: Gateway,
    *,
    seconds: float,
    partitions: int = 100,
    events: int = 0,
    latency: float = LATENCY,
    backend: Backend = "asyncio",
    seed: str = "1",
    meanwhile: Callable[[LimitedTransport], Awaitable[None]] | None = None,
    **options: Any,
) -> Fared:
    """Consume for so many virtual seconds, or until all events came of a feed that holds some.

    Arguments:
        events: of each partition, in pages of 10.
        meanwhile: runs beside the consumer.
        options: of the consumer.
    """
    publisher = Publisher(partitions, page_size=10)
    for partition in range(partitions):
        numbers(publisher, partition, range(events))
    transport = LimitedTransport(publisher, gateway, latency)

    async def main() -> Fared:
        began, seen, error = anyio.current_time(), 0, None
        with anyio.move_on_after(seconds):
            try:
                async with anyio.create_task_group() as tasks:
                    if meanwhile is not None:
                        tasks.start_soon(meanwhile, transport)
                    async with (
                        httpx.AsyncClient(transport=transport, timeout=None) as http,
                        FeedConsumer("http://feed/feed", http=http, **options) as consumer,
                    ):
                        async for batch in consumer.batches():
                            seen += len(n_of(batch.events))
                            await batch.commit()
                            if events and seen >= events * partitions:
                                break
                    tasks.cancel_scope.cancel()
            except* FeedError as group:
                error = group.exceptions[0]
        lasted = anyio.current_time() - began
        return Fared(
            len(transport.granted),
            len(transport.refused),
            lasted,
            seen,
            error,  # type: ignore[arg-type]
            _longest_wait(transport, began, began + lasted, partitions),
        )

    return run_in_virtual_time(main, backend=backend, seed=seed)


def _longest_wait(
    transport: LimitedTransport, began: float, ended: float, partitions: int
) -> float:
    last = dict.fromkeys(range(partitions), began)
    longest = 0.0
    for when, partition in transport.granted:
        if partition is not None:
            longest = max(longest, when - last[partition])
            last[partition] = when
    return max(longest, *(ended - when for when in last.values()))
