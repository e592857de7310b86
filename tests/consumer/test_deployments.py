"""R10: two versions of a publisher in turn, and discoveries that lag behind. On virtual time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from feedapi_client import FeedConsumer, Limits, RetryPolicy
from feedapi_client.status import PartitionState
from tests.consumer.helpers import n_of, take, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.virtual_time]

Query = dict[str, str]
Respond = Callable[[str, Query], tuple[int, bytes]]
"""What a server answers to a path and a query."""
HTML = b"<!DOCTYPE html><html><body>We'll be back soon</body></html>"
QUICK = Limits(poll_interval=0.002, max_poll_interval=0.002, discovery_interval=0.02)
RETRY = RetryPolicy(base_delay=0.002, max_delay=0.01)


class Server:
    """Answers each request by a function, without a socket. Counts requests and statuses."""

    def __init__(self, respond: Respond) -> None:
        self.respond = respond
        self.counts: Counter[object] = Counter()

    async def handle(self, request: httpx.Request) -> httpx.Response:
        await anyio.sleep(0.001)
        query = dict(request.url.params)
        status, body = self.respond(request.url.path, query)
        self.counts["fetch" if query else "discovery"] += 1
        self.counts[status] += 1
        return httpx.Response(status, content=body)


def discovery(token: str | None, partitions: int = 1) -> tuple[int, bytes]:
    found: dict[str, Any] = {"partitions": [{"id": str(id)} for id in range(partitions)]}
    if token is not None:
        found["token"] = token
    return 200, json.dumps(found).encode()


def page(cursor: str, *, v1: bool = False) -> tuple[int, bytes]:
    """The event after this cursor; its number is the next cursor."""
    n = 0 if cursor == "_first" else int(cursor) + 1
    place = {"partition": 0} if v1 else {}
    lines = [{**place, "data": {"n": n}}, {**place, "cursor": str(n)}]
    return 200, "".join(json.dumps(line) + "\n" for line in lines).encode()


class Version:
    """One version of the publisher: all its answers, by a token."""

    def __init__(self, token: str) -> None:
        self.token = token

    def __call__(self, path: str, query: Query) -> tuple[int, bytes]:
        if not query:
            return discovery(self.token)
        return page(query["cursor"]) if query.get("token") == self.token else (409, b"stale")


class Version1:
    """The old version, a ZeroEventHub. It knows none of the new paths."""

    def __call__(self, path: str, query: Query) -> tuple[int, bytes]:
        if path != "/feed":
            return 404, b"404 page not found"
        if "n" not in query:
            return 400, b"handshake error: partition count missing"
        return page(query["cursor0"], v1=True)


class InTurn:
    """A load balancer that sends each request to the next server."""

    def __init__(self, *servers: Respond) -> None:
        self.servers = list(servers)
        self.requests = 0

    def __call__(self, path: str, query: Query) -> tuple[int, bytes]:
        self.requests += 1
        return self.servers[self.requests % len(self.servers)](path, query)


def consumer_of(server: Server, **options: Any) -> FeedConsumer:
    http = httpx.AsyncClient(transport=httpx.MockTransport(server.handle))
    options = {"limits": QUICK, "retry": RETRY, "http": http, **options}
    return FeedConsumer("http://feed/feed", **options)


def lagging(lag: int, behind: str) -> Respond:
    """After a change of the token, the first answers of one of the two are the old ones."""
    answers: Counter[str] = Counter()

    def respond(path: str, query: Query) -> tuple[int, bytes]:
        kind = "fetch" if query else "discovery"
        answers[kind] += 1
        changed = answers["fetch"] > 20 + (lag if kind == behind else 0)
        return Version("t2" if changed else "t1")(path, query)

    return respond


V1: dict[str, Any] = {"v1_partitions": 1}
TURNS: dict[str, tuple[Callable[[], Respond], dict[str, Any], set[int]]] = {
    "two tokens": (lambda: InTurn(Version("t1"), Version("t2")), {}, {409}),
    "the old token twice": (
        *(lambda: InTurn(Version("t1"), Version("t1"), Version("t2")), {}, {409}),
    ),
    "each token twice": (*(lambda: InTurn(*map(Version, ("t1", "t2", "t2", "t1"))), {}, {409}),),
    "version 1 beside version 2": (lambda: InTurn(Version1(), Version("t2")), V1, {404, 400}),
    "discovery lags": (lambda: lagging(3, "discovery"), {}, set()),
    "fetches lag": (lambda: lagging(8, "fetch"), {}, {409}),
}


@pytest.mark.parametrize("case", TURNS)
async def test_r10_each_event_comes_once_while_two_versions_answer(case: str) -> None:
    make, options, refused = TURNS[case]
    server = Server(make())
    async with consumer_of(server, **options) as consumer:
        assert n_of(await take(aiter(consumer), 40)) == list(range(40))
    assert not refused or any(server.counts[status] for status in refused)


async def test_r10_version_1_comes_up_beside_a_version_2_that_runs() -> None:
    """Without v1_partitions: its answer to discovery is no feed's, for as long as it is there."""
    version2 = Version("t2")
    server = Server(version2)
    async with consumer_of(server) as consumer:
        events = aiter(consumer)
        assert n_of(await take(events)) == [0]
        server.respond = InTurn(Version1(), version2, Version("t3"))
        assert n_of(await take(events, 10)) == list(range(1, 11))


@asynccontextmanager
async def reading_on(consumer: FeedConsumer, *expected: int) -> AsyncIterator[None]:
    """What is read during the block, and after it, are these events."""
    events = aiter(consumer)

    async def go_on() -> None:
        assert n_of(await take(events, len(expected))) == [*expected]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(go_on)
        yield


@pytest.mark.parametrize("answer", [(404, b"not found"), (200, HTML), (200, b"[]"), (503, b"")])
async def test_r10_a_gateway_under_maintenance_answers_everything_for_a_while(
    answer: tuple[int, bytes],
) -> None:
    up = Version("t1")
    server = Server(up)
    async with consumer_of(server) as consumer, reading_on(consumer, *range(6)):
        await wait_until(lambda: consumer.status().events >= 3)
        server.respond = lambda path, query: answer
        failed = dict(server.counts)
        more = 1 if answer[0] == 404 else 3  # a refused partition waits for a discovery
        await wait_until(lambda: server.counts["fetch"] >= failed["fetch"] + more)
        await wait_until(lambda: server.counts["discovery"] >= failed["discovery"] + 3)
        assert consumer.status()[0].state is PartitionState.RETRYING
        server.respond = up


async def test_r10_the_time_in_which_discovery_failed_is_not_counted() -> None:
    """Only while discovery lists the partition a refusal is the partition's fault."""
    up, discoveries = Version("t1"), 0

    def refused(path: str, query: Query) -> tuple[int, bytes]:
        nonlocal discoveries
        if query:
            return 404, b"not found"
        discoveries += 1
        return (404, b"not found") if discoveries < 20 else discovery("t1")

    patient = RetryPolicy(base_delay=0.002, max_delay=0.01, refused_for=0.5)
    server = Server(up)
    async with consumer_of(server, retry=patient) as consumer, reading_on(consumer, *range(6)):
        await wait_until(lambda: consumer.status().events >= 1)
        server.respond = refused
        # More than `refused_for` after the first refusal, since discoveries keep a distance.
        await wait_until(lambda: discoveries >= 21)
        server.respond = up
