"""A publisher and the network in front of it, on virtual time: slow, failing, lagging behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

import anyio
import httpx
import orjson

from feedapi_client.model import DialectName
from feedapi_client.testing.publisher import Publisher, SplitMethod
from feedapi_client.testing.simulator.oracle import Trace

FEED = "http://simulated/feed"
FAULTS = {
    "500": "are answered 500",
    "503": "are answered 503",
    "429": "are answered 429",
    "404": "are answered 404",
    "html": "are answered with HTML",
    "connect": "find no connection",
    "stall": "are never answered",
    "slow": "are answered slowly",
    "torn": "are answered with a body that breaks off",
    "error-text": "are answered with an error in the middle of the body",
    "reset": "lose their connection in the middle of the body",
    "lag": "are answered by a replica that is some seconds behind",
}
"""What can go wrong, and how it is told."""
Target = Literal["discovery", "fetch", "both"]

_REQUEST_SECONDS = 30.0
_TOKEN = "token"  # noqa: S105 - of a topology
_MIDWAY = ("torn", "error-text", "reset")
_OK, _BAD_REQUEST = 200, 400

Change = Callable[[Publisher], object]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong for some time.

    Attributes:
        kind: one of `FAULTS`.
        on: the requests that it hits, and `share` the part of them, from 0 to 1.
        until: the virtual time at which it ends.
        behind: how many seconds old the replica is that answers ("lag").
    """

    kind: str
    on: Target
    share: float
    until: float
    behind: float = 0.0

    def hits(self, target: Target, random: Random) -> bool:
        """Return whether it hits a request."""
        return self.on in (target, "both") and random.random() < self.share


@dataclass(slots=True)
class Replica:
    """A publisher to which the changes of the feed come some time after they were made."""

    publisher: Publisher
    applied: int = 0


class Feed:
    """The feed of a history: its publisher, the replicas that lag behind it, and all faults.

    Arguments:
        make: makes a publisher without an event. All that are made answer alike.
        latency: the longest time that a request takes without a fault, in seconds.
        random: decides what fails, and how long everything takes.
        trace: gets a line for each request.

    Attributes:
        faults: what goes wrong at present.
        published: how many events each entity has.
        parents: the parent of each partition that starts after another one.
    """

    def __init__(
        self, make: Callable[[], Publisher], *, latency: float, random: Random, trace: Trace
    ) -> None:
        self.faults: list[Fault] = []
        self.published: dict[int, int] = {}
        self.parents: dict[int, int] = {}
        self.random = random
        self.trace = trace
        self.latency = latency
        self._make = make
        self._publisher = make()
        self._changes: list[tuple[float, Change]] = []
        self._replicas: dict[float, Replica] = {}

    # ------------------------------------------------------------------ what happens to the feed

    def publish(self, entity: int) -> None:
        """Publish the next event of an entity."""
        n = self.published[entity] = self.published.get(entity, 0) + 1
        payload = {"entity": entity, "n": n}
        self._change(lambda publisher: publisher.publish(entity, payload))

    def split(self, which: int, parts: int, method: SplitMethod) -> None:
        """Split one of the open partitions."""
        partitions = self._publisher.open_partitions()
        parent = partitions[which % len(partitions)]
        if parent in self.parents:
            # A partition can't say both what it starts after and whose cursors it takes over.
            method = "starts-after"
        token = f"{_TOKEN}{len(self._changes)}"  # drawn ones would differ from replica to replica

        def change(publisher: Publisher) -> None:
            publisher.split(parent, parts, method=method)
            publisher.token = token

        self._change(change)
        listed = self._publisher.partitions.values()
        self.parents |= {p.id: p.starts_after for p in listed if p.starts_after is not None}

    def _change(self, change: Change) -> None:
        change(self._publisher)
        self._changes.append((self.trace.now(), change))

    # ------------------------------------------------------------------ requests

    def fault(self, target: Target, *, lag: bool) -> Fault | None:
        """Return what goes wrong with a request: a fault, or with `lag` a replica that lags."""
        now = self.trace.now()
        for fault in self.faults:
            wanted = now < fault.until and (fault.kind == "lag") is lag
            if wanted and fault.hits(target, self.random):
                return fault
        return None

    async def answer(self, request: httpx.Request, target: Target) -> tuple[int, bytes]:
        """Return status and body of a response, perhaps those of a replica."""
        lag = self.fault(target, lag=True)
        if lag is None:
            return await _answer(self._publisher, request)
        status, body = await _answer(self._replica(lag.behind), request)
        cursor = request.url.params.get("cursor")
        if status == _BAD_REQUEST and cursor is not None:
            # The cursor is ahead of the replica: it has nothing new, and says so.
            return _OK, orjson.dumps({"cursor": cursor}) + b"\n"
        return status, body

    def _replica(self, behind: float) -> Publisher:
        if behind not in self._replicas:
            self._replicas[behind] = Replica(self._make())
        replica = self._replicas[behind]
        for made_at, change in self._changes[replica.applied :]:
            # What the feed began with is on every replica.
            if made_at > max(0.0, self.trace.now() - behind):
                break
            change(replica.publisher)
            replica.applied += 1
        return replica.publisher


async def _answer(publisher: Publisher, request: httpx.Request) -> tuple[int, bytes]:
    """Return what a publisher answers. This is all that is needed of one to serve it."""
    response = await httpx.ASGITransport(publisher.asgi).handle_async_request(request)
    return response.status_code, await response.aread()


def new_publisher(
    partitions: int, dialect: DialectName, page_size: int, checkpoint_every: int, seed: int | None
) -> Publisher:
    """Return a publisher without events. With a `seed` it cuts each page differently."""
    publisher = Publisher(
        partitions,
        dialect=dialect,
        page_size=page_size,
        checkpoint_every=checkpoint_every,
        seed=seed,
    )
    publisher.token = _TOKEN
    return publisher


class Network(httpx.AsyncBaseTransport):
    """The connections of one process to the feed.

    A process that was killed is `dead`: whatever it still asks reaches nobody.
    """

    def __init__(self, feed: Feed) -> None:
        self.dead = False
        self._feed = feed

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request in virtual time."""
        feed, random = self._feed, self._feed.random
        if self.dead:
            raise httpx.ConnectError("simulated: the process is gone", request=request)
        target: Target = "fetch" if request.url.query else "discovery"
        name = request.url.raw_path.decode()
        await anyio.sleep(random.uniform(0.001, feed.latency))
        fault = feed.fault(target, lag=False)
        kind = "" if fault is None else fault.kind
        if kind == "connect":
            feed.trace.add("GET {} -> no connection", name)
            raise httpx.ConnectError("simulated: connection refused", request=request)
        if kind == "stall":
            feed.trace.add("GET {} -> stalls", name)
            await anyio.sleep(_timeout(request))
            raise httpx.ReadTimeout("simulated: silence", request=request)
        if kind.isdecimal():
            status, body, headers = int(kind), b"simulated failure", {"retry-after": "1"}
        elif kind == "html":
            status, body, headers = _OK, b"<html>under maintenance</html>", {}
        else:
            (status, body), headers = await feed.answer(request, target), {}
        text = kind or f"{len(body.splitlines())} lines"
        feed.trace.add("GET {} -> {} {}", name, status, text)
        sent = _Body(body, kind, request, random)
        return httpx.Response(status, headers=headers, stream=sent, request=request)


class _Body(httpx.AsyncByteStream):
    """Sends a body, with the fault that it has."""

    def __init__(self, body: bytes, kind: str, request: httpx.Request, random: Random) -> None:
        self._body = body
        self._kind = kind
        self._request = request
        self._random = random

    async def __aiter__(self) -> AsyncIterator[bytes]:
        kind, body = self._kind, self._body
        if kind in _MIDWAY and body:
            body = body[: self._random.randint(1, len(body))]
        if kind == "slow":
            for line in body.splitlines(keepends=True):
                await anyio.sleep(self._random.uniform(0.0, 1.0))
                yield line
            return
        yield body
        if kind == "error-text":
            yield b"Internal server error"
        elif kind == "reset":
            raise httpx.RemoteProtocolError("simulated: the connection is gone")


def _timeout(request: httpx.Request) -> float:
    timeout = request.extensions.get("timeout", {}).get("read")
    return _REQUEST_SECONDS if timeout is None else float(timeout)
