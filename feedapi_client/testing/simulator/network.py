"""A publisher and the network in front of it, on virtual time: slow, failing, lagging behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from random import Random
from typing import Literal

import anyio
import httpx
import orjson

from feedapi_client.testing.publisher import Publisher, SplitMethod
from feedapi_client.testing.simulator.oracle import Trace

FEED = "http://simulated/feed"
FAULTS = {
    "404": "are answered 404",
    "429": "are answered 429",
    "503": "are answered 503",
    "connect": "find no connection",
    "stall": "are never answered",
    "torn": "are answered with a body that breaks off",
    "reset": "lose their connection in the middle of the body",
    "lag": "are answered by a replica that lags",
}
"""What can go wrong with requests, and how it is told."""
STORE_FAULTS = {"store fails": "fail", "store stalls": "take up to a minute"}
Target = Literal["discoveries", "fetches", "requests", "operations"]

_REQUEST_SECONDS = 30.0
_TOKEN = "token"  # noqa: S105 - of a topology
_LAG_SECONDS = 3.0
_OK, _BAD_REQUEST = 200, 400

Change = Callable[[Publisher], object]


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """Something that goes wrong for some time.

    Attributes:
        kind: one of `FAULTS` or `STORE_FAULTS`.
        on: what it hits, and `part` the part of these, from 0 to 1.
        until: the virtual time at which it ends.
    """

    kind: str
    on: Target
    part: float
    until: float


class Faults:
    """What goes wrong at present.

    Attributes:
        active: those that have begun.
        random, trace: decide what is hit, and tell it.
    """

    def __init__(self, random: Random, trace: Trace) -> None:
        self.active: list[InjectedFault] = []
        self.random = random
        self.trace = trace

    def pick(self, target: Target, kinds: Collection[str], share: float = 1.0) -> str:
        """Return which of these kinds hits a target, with a `share` of its usual odds; or ""."""
        for fault in self.active:
            there = fault.kind in kinds and fault.on in (target, "requests")
            alive = self.trace.now() < fault.until
            if there and alive and self.random.random() < fault.part * share:
                return fault.kind
        return ""


class SimulatedFeed:
    """The feed of a history: its publisher, replicas that lag behind it, and all faults.

    Arguments:
        make: makes a publisher without an event. All that are made answer alike.
        faults: what goes wrong with requests.
        latency: the longest time that a request takes without a fault, in seconds.

    Attributes:
        published: how many events each entity has.
        parents: the parent of each partition that starts after another one.
    """

    def __init__(self, make: Callable[[], Publisher], faults: Faults, *, latency: float) -> None:
        self.published: dict[int, int] = {}
        self.parents: dict[int, int] = {}
        self.faults = faults
        self.latency = latency
        self._now = faults.trace.now
        self._make = make
        self._publisher = self._new_publisher()
        self._changes: list[tuple[float, Change]] = []
        self._replica, self._replicated = self._new_publisher(), 0
        """A publisher that lags, and how many changes have come to it."""

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
        self._changes.append((self._now(), change))

    def _new_publisher(self) -> Publisher:
        publisher = self._make()
        publisher.token = _TOKEN
        return publisher

    # ------------------------------------------------------------------ requests

    async def answer(self, request: httpx.Request, target: Target) -> tuple[int, bytes]:
        """Return status and body of a response, perhaps those of a replica."""
        if not self.faults.pick(target, ["lag"]):
            return await _answer(self._publisher, request)
        # What the feed began with is on every replica.
        until = max(0.0, self._now() - _LAG_SECONDS)
        for made_at, change in self._changes[self._replicated :]:
            if made_at <= until:
                change(self._replica)
                self._replicated += 1
        status, body = await _answer(self._replica, request)
        cursor = request.url.params.get("cursor")
        if status == _BAD_REQUEST and cursor is not None:
            # The cursor is ahead of the replica: it has nothing new, and says so.
            return _OK, orjson.dumps({"cursor": cursor}) + b"\n"
        return status, body


async def _answer(publisher: Publisher, request: httpx.Request) -> tuple[int, bytes]:
    """Return what a publisher answers. Nothing else of it is needed to serve it."""
    response = await httpx.ASGITransport(publisher.asgi).handle_async_request(request)
    return response.status_code, await response.aread()


class Network(httpx.AsyncBaseTransport):
    """The connections of one process to the feed, while it is `alive`."""

    def __init__(self, feed: SimulatedFeed, alive: Callable[[], bool]) -> None:
        self._feed = feed
        self._alive = alive

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request in virtual time."""
        feed, random, trace = self._feed, self._feed.faults.random, self._feed.faults.trace
        if not self._alive():
            raise httpx.ConnectError("simulated: the process is gone", request=request)
        target: Target = "fetches" if request.url.query else "discoveries"
        name = request.url.raw_path.decode()
        await anyio.sleep(random.uniform(0.001, feed.latency))
        kind = feed.faults.pick(target, FAULTS.keys() - {"lag"})
        if kind == "connect":
            trace.add("GET {} -> no connection", name)
            raise httpx.ConnectError("simulated: connection refused", request=request)
        if kind == "stall":
            trace.add("GET {} -> stalls", name)
            await anyio.sleep(request.extensions["timeout"]["read"] or _REQUEST_SECONDS)
            raise httpx.ReadTimeout("simulated: silence", request=request)
        if kind.isdecimal():
            status, body, headers = int(kind), b"simulated failure", {"retry-after": "1"}
        else:
            (status, body), headers = await feed.answer(request, target), {}
        text = kind or f"{len(body.splitlines())} lines"
        trace.add("GET {} -> {} {}", name, status, text)
        if kind in ("torn", "reset"):
            body = body[: random.randint(1, len(body) or 1)]
        content = _sent(body, reset=kind == "reset")
        return httpx.Response(status, headers=headers, content=content)


async def _sent(body: bytes, *, reset: bool) -> AsyncIterator[bytes]:
    """Send a body, and with `reset` break the connection then."""
    yield body
    if reset:
        raise httpx.RemoteProtocolError("simulated: the connection is gone")
