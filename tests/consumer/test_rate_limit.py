"""A publisher that limits requests: the feed slows down as a whole (R14). On virtual time."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import anyio
import httpx
import pytest

from feedapi_client import FeedConsumer, FeedError, FeedUnavailableError, Limits, RetryPolicy
from feedapi_client.testing import Publisher
from tests.consumer.helpers import n_of, numbers
from tests.simulation.clock import Backend, run_in_virtual_time

MINUTE = 60.0
LONG = pytest.mark.slow
"""Hours of virtual time take a second or two. The quick answer has one case of each kind."""
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

    transport: LimitedTransport
    seconds: float
    events: int
    error: FeedError | None
    waited: float
    """The longest time between two answers to a partition."""

    @property
    def granted(self) -> int:
        return len(self.transport.granted)

    @property
    def refused(self) -> int:
        return len(self.transport.refused)

    @property
    def ratio(self) -> float:
        """Refused requests for each granted one."""
        return self.refused / max(self.granted, 1)

    @property
    def rate(self) -> float:
        """Granted requests a second."""
        return self.granted / self.seconds


def consume_behind(
    gateway: Gateway,
    *,
    seconds: float,
    partitions: int = 100,
    events: int = 0,
    latency: float = LATENCY,
    backend: Backend = "asyncio",
    seed: str = "1",
    refuses: set[int | None] | None = None,
    meanwhile: Callable[[LimitedTransport], Awaitable[None]] | None = None,
    **options: Any,
) -> Fared:
    """Consume for so many virtual seconds, or until all events came of a feed that holds some.

    Arguments:
        events: of each partition, in pages of 10.
        refuses: the partitions that the gateway looks at; None: all.
        meanwhile: runs beside the consumer.
        options: of the consumer.
    """
    publisher = Publisher(partitions, page_size=10)
    for partition in range(partitions):
        numbers(publisher, partition, range(events))
    transport = LimitedTransport(publisher, gateway, latency)
    transport.refuses = refuses

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
            transport,
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


# ---------------------------------------------------------------------- what comes of it


async def lift(transport: LimitedTransport) -> None:
    await anyio.sleep(5 * MINUTE)
    transport.gateway = None


class Closed(Gateway):
    """Lets nothing pass after half a minute."""

    def passes(self, now: float, under_way: int) -> bool:
        return now < 30.0


Bounds = dict[str, tuple[float, float]]
"""Of attributes of `Fared`: from the first number up to the second one."""


def at_pace(least: float) -> Bounds:
    """What is right where 2 requests a second may pass, of 100 partitions, for ten minutes."""
    return {
        "seconds": (10 * MINUTE, 10 * MINUTE + 0.001),
        "ratio": (0, 0.2),
        "rate": (least, math.inf),
        "waited": (0, 2 * 100 / least),  # two rounds through all partitions
    }


POLLS: dict[str, Any] = {"seconds": 10 * MINUTE}
HISTORY: dict[str, Any] = {"seconds": 10 * MINUTE, "events": 250}
SLOWLY: dict[str, Any] = {"seconds": 30 * MINUTE, "partitions": 10}
AT_ONCE = 2.5 * (100 * 10 * 0.5 / 4)  # 2.5 times what four at once would take
FATAL = RetryPolicy(decide=lambda error: "fatal")
CASES: dict[str, tuple[Callable[[], Gateway], dict[str, Any], Bounds]] = {
    "2 a second, polls": (lambda: TokenBucket(2), POLLS, at_pace(1.5)),
    "2 a second, history": (lambda: TokenBucket(2), HISTORY, at_pace(1.5)),
    "20 a second, which is found within seconds": (
        lambda: TokenBucket(20, 20),
        {"seconds": MINUTE, "events": 250},
        {"rate": (14, math.inf), "ratio": (0, 0.2)},
    ),
    "2 a second, bursts of 20": (lambda: TokenBucket(2, 20), HISTORY, at_pace(1.5)),
    "429 with Retry-After": (lambda: TokenBucket(2, says=True), POLLS, at_pace(1.3)),
    "503 with Retry-After": (
        lambda: TokenBucket(2, status=503, says=True),
        HISTORY,
        at_pace(1.3),
    ),
    "120 a minute": (lambda: FixedWindow(120, 60), POLLS, at_pace(1.5)),
    "120 a minute, unsaid": (lambda: FixedWindow(120, 60, says=False), HISTORY, at_pace(1.5)),
    **{
        f"one in ten seconds, {backend}": (
            lambda: TokenBucket(0.1),
            {**SLOWLY, "backend": backend},
            {"ratio": (0, 1.0), "rate": (0.07, math.inf)},
        )
        for backend in ("asyncio", "trio")
    },
    "four at once": (
        lambda: AtOnce(4),
        {"seconds": 20 * MINUTE, "events": 100, "latency": 0.5},
        {"events": (100 * 100, 100 * 100 + 1), "ratio": (0, 0.2), "seconds": (0, AT_ONCE)},
    ),
    "the limit is lifted, and the pace rises": (
        lambda: TokenBucket(2),
        {"seconds": 8 * MINUTE, "partitions": 20, "events": 1000, "meanwhile": lift},
        # 1,500 requests more than the limit lets pass.
        {"events": (20 * 1000, 20 * 1000 + 1), "seconds": (0, 6.5 * MINUTE)},
    ),
    "no partition is given up while others go on, however rarely its turn comes": (
        lambda: TokenBucket(1),
        {"seconds": 20 * MINUTE, "partitions": 60, "retry": RetryPolicy(give_up_after=20.0)},
        {"seconds": (20 * MINUTE, math.inf)},
    ),
    "without progress it gives up": (
        Closed,
        {"seconds": 20 * MINUTE, "partitions": 50, "retry": RetryPolicy(give_up_after=300.0)},
        {"seconds": (330.0, 375.0), "refused": (1, 120)},
    ),
    "a policy calls a limit fatal": (
        lambda: TokenBucket(2, 5),
        {"seconds": MINUTE, "retry": FATAL},
        {"seconds": (0, 1.0)},
    ),
    "the present ends of many partitions": (
        lambda: TokenBucket(2),
        {"seconds": 5 * MINUTE, "start": "last"},
        {"ratio": (0, 1.0)},
    ),
}
QUICK = {"2 a second, polls", "20 a second, which is found within seconds", *[*CASES][-4:]}
ENDS = {"without progress it gives up", "a policy calls a limit fatal"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else LONG) for c in CASES])
def test_r14_a_feed_with_a_limit_is_read_at_its_pace(case: str) -> None:
    """With default policies, unless the case says otherwise."""
    gateway, options, expected = CASES[case]
    fared = consume_behind(gateway(), **options)
    if case in ENDS:
        assert isinstance(fared.error, FeedUnavailableError)
        assert fared.error.status == 429
    else:
        assert fared.error is None
    for name, (least, most) in expected.items():
        assert least <= getattr(fared, name) < most, name


@LONG
def test_r14_retry_after_of_a_429_stops_the_whole_feed_for_that_long() -> None:
    fared = consume_behind(FixedWindow(200, 60), seconds=5 * MINUTE, events=100)
    refused = [when for when, _ in fared.transport.refused]
    asked = sorted([when for when, _ in fared.transport.granted] + refused)
    for when in refused:
        allowed = when - when % 60 + 60
        # The refused request takes a moment to come back, while others are on their way.
        early = [each for each in asked if when + 0.1 < each < allowed]
        assert not early, "asked before the time that Retry-After names"
    assert fared.granted >= 4 * 200


class OnePartition(Gateway):
    """Refuses all requests of a partition, and no others."""

    def __init__(self, status: int, says: float | None = None) -> None:
        self.status, self._says = status, says

    def retry_after(self, now: float) -> float | None:
        return self._says


@pytest.mark.parametrize(
    ("status", "says"),
    [(429, 30.0), pytest.param(429, None, marks=LONG), pytest.param(503, 30.0, marks=LONG)],
)
def test_r14_one_partition_that_is_always_refused_does_not_keep_others_waiting(
    status: int, says: float | None
) -> None:
    fared = consume_behind(
        OnePartition(status, says),
        seconds=20 * MINUTE,
        partitions=20,
        refuses={0, 1, 2},
        retry=RetryPolicy(give_up_after=None),
    )
    assert fared.error is None
    last = [when for when, _ in fared.transport.granted if when > 15 * MINUTE]
    assert len(last) > 400, "17 partitions are polled every 10 seconds"


@LONG
def test_r14_a_limit_is_reported_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "feedapi_client"):
        consume_behind(TokenBucket(2), seconds=10 * MINUTE, limits=Limits(report_interval=60))
    ours = [record.getMessage() for record in caplog.records]
    assert 5 <= len(ours) <= 12
    assert "status 429" in ours[0]
    assert "asked more slowly" in ours[0]
