"""The network and the publisher's handlers, which answer from the model."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from random import Random
from typing import NamedTuple
from urllib.parse import unquote

import anyio
import httpx

from tests.simulation import wire
from tests.simulation.clock import in_drawn_order, sleep, staggered
from tests.simulation.end_evidence import Evidence
from tests.simulation.faults import FaultKind, Faults
from tests.simulation.http import REQUEST_SECONDS, SimulatedResponse
from tests.simulation.manners import Rate
from tests.simulation.trace import Trace
from tests.simulation.wall import START
from tests.simulation.world import Dialect, ModelPartition, Version, World

FEED_PATH = "/feed"
_REFUSALS: dict[FaultKind, int] = {"500": 500, "503": 503, "429": 429, "404": 404, "409": 409}
_BROKEN_BODIES: frozenset[FaultKind] = frozenset({"torn", "error-text", "reset", "stall-body"})
_SERVER_ERROR = 500
_STREAM_PAUSE = 0.2
_PROXY_BYTES = 8192


@dataclass(slots=True)
class Deployment:
    """While it lasts, instances of two versions answer in turn."""

    versions: tuple[Version, Version]
    until: float


class Fetched(NamedTuple):
    """One answered fetch, for the oracle. `end` is the end that the answer knows of."""

    partition: int
    asked: int
    end: int
    empty: bool | None = None
    """Whether it holds nothing; None where it says nothing about that."""


class Asked(NamedTuple):
    """What a request asks for. `partition` is None for a discovery."""

    target: str
    path: str
    params: dict[str, str]
    partition: int | None


_READ = 4096
_read: dict[int, tuple[httpx.URL, Asked]] = {}
"""What was read in the last URLs, by their addresses: to compare two of them takes long."""


def _asked(url: httpx.URL) -> Asked:
    """Read the path and the query of a request. Many histories send the same ones."""
    known = _read.get(id(url))
    if known is not None:  # whose URL is kept: no other one has its address
        return known[1]
    if len(_read) >= _READ:
        _read.clear()
    asked = _parsed(url.raw_path.decode())
    _read[id(url)] = url, asked
    return asked


def _parsed(text: str) -> Asked:
    path, _, query = text.partition("?")
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    params = {unquote(name): unquote(value) for name, _, value in pairs}
    return Asked(text, path, params, _partition(params))


@dataclass(slots=True)
class Answer:
    """A response before it is sent."""

    status: int
    chunks: list[bytes] = field(default_factory=list)
    text: str = ""
    stream: tuple[ModelPartition, Dialect] | None = None
    selected: bool = False
    headers: dict[str, str] | None = None
    reached: int = 0
    holds_nothing: bool = False
    seconds: float = 0.0
    handshake: tuple[int, ...] = ()
    """The partitions that a version without discovery has, all of them open."""
    listed: tuple[int, ...] = ()
    """The partitions in a discovery."""
    closed: tuple[int, ...] = ()
    """Those of them that are closed."""
    evidence: Evidence | None = None
    """Of the process that asked."""
    fetched: Fetched | None = None
    """What the oracle hears once the page was read: a client may give an answer up before."""


class SimulatedPublisher:
    """All instances of a publisher, with the network in front of them.

    Arguments:
        world: the data.
        faults: what goes wrong.
        style: how pages are cut.
        stream: whether the publisher offers responses that stay open.
        latency: the longest time that a request takes without a fault, in seconds.
        random: decides all that is random here.
        trace: gets a line for each request.
        observe: is called with each complete page that is sent.
    """

    def __init__(
        self,
        world: World,
        faults: Faults,
        *,
        style: wire.PageStyle,
        stream: bool,
        latency: float,
        random: Random,
        trace: Trace,
        now: Callable[[], float],
        observe: Callable[[Fetched], None],
    ) -> None:
        self.world = world
        self.faults = faults
        self.deployment: Deployment | None = None
        self.stray_cursors: list[str] = []
        """Requests with a cursor that no ancestor of their partition ever had."""
        self._style = style
        self._stream = stream
        self._latency = latency
        self._random = random
        self.trace = trace
        self.now = now
        self._observe = observe
        self.rate = Rate(world.manners.rate)

    async def respond(
        self, request: httpx.Request, asked: Asked, passed: set[tuple[int, str]]
    ) -> tuple[Answer, FaultKind | None]:
        """Answer one request, after the time that it takes."""
        if self.rate.is_limited and not self.rate.grants(self.now()):
            return await self._slowed_down(asked), None
        fault = self.faults.pick(partition=asked.partition, now=self.now())
        await sleep(self._random.uniform(0.001, self._latency))
        if not in_drawn_order():
            await staggered(self._random)
        if fault == "connect":
            self.trace.add("GET {} -> no connection", asked.target)
            raise httpx.ConnectError("simulated: connection refused", request=request)
        if fault == "stall":
            self.trace.add("GET {} -> stalls", asked.target)
            await sleep(_timeout(request))
            raise httpx.ReadTimeout("simulated: silence", request=request)
        answer = self._refusal(fault) or self._answer(asked, fault, passed)
        self.trace.add("GET {} -> {} {}", asked.target, answer.status, answer.text or fault or "")
        return answer, fault

    async def _slowed_down(self, asked: Asked) -> Answer:
        await sleep(self._random.uniform(0.001, self._latency))
        status = self.world.manners.rate_status
        self.trace.add("GET {} -> {} one too many", asked.target, status)
        wait = status == 503 or self._random.random() < 0.5
        return Answer(status, [b"slow down"], headers=self._wait(1) if wait else None)

    def _refusal(self, fault: FaultKind | None) -> Answer | None:
        if fault in _REFUSALS:
            wait = fault == "429" and self._random.random() < 0.5
            headers = self._wait(self._random.randint(0, 3)) if wait else None
            return Answer(_REFUSALS[fault], [b"simulated failure"], headers=headers)
        if fault == "maintenance":
            return Answer(200, [b'{"status":"maintenance"}'])
        return Answer(200, [b"<html>under maintenance</html>"]) if fault == "html" else None

    def _wait(self, seconds: int) -> dict[str, str]:
        """Return the headers that ask to wait, as a number or by the publisher's clock."""
        if seconds % 2:
            return {"retry-after": str(seconds)}
        now = START + self.now()
        until = formatdate(now + seconds, usegmt=True)
        return {"date": formatdate(now, usegmt=True), "retry-after": until}

    def _answer(
        self, request: Asked, fault: FaultKind | None, passed: set[tuple[int, str]]
    ) -> Answer:
        version, params = self._version(), request.params
        # What the feed began with is on every replica.
        lag = self.faults.lag(partition=request.partition, now=self.now())
        at = max(0.0, self.now() - lag)
        if not params and request.path == FEED_PATH:
            if version.dialect == "v1":
                refused = b"handshake error: partition count missing"
                return Answer(400, [refused], handshake=self.world.first)
            return self._discovery(version, at)
        found = self._addressed(request, version)
        if isinstance(found, Answer):
            return found
        partition = self.world.partitions.get(found[0])
        if partition is None or not partition.is_listed(at):
            return Answer(404, [b"no such partition"])
        if fault == "discovery":
            return Answer(200, self._discovery(version, at).chunks)
        selected = "event-types" in params
        asked = self._sequence(partition, found[1], at, selected=selected)
        if asked is None:
            self.stray_cursors.append(f"partition {partition.id} asked at {found[1]}")
            return Answer(400, [b"no such cursor"])
        if fault in ("silent", "204"):
            answer = Answer(204 if fault == "204" else 200)
            answer.fetched = Fetched(partition.id, asked, asked, True)
            return answer
        # A body that breaks off may look like a complete one without a line.
        end = asked if fault in _BROKEN_BODIES else self.world.end(partition, at)
        seconds = _stream_seconds(params, self._stream)
        if asked > self.world.sequence(at):
            end = self.world.end(partition, at)
            tail = partition.selected_cursor(end) if selected else partition.cursor(end)
            known = (partition.id, tail) in passed
            return self._from_behind(
                partition, found[1], asked, end, version, selected=selected, known=known
            )
        passed.add((partition.id, found[1]))
        answer = self._page(partition, found[1], asked, at, version, seconds, selected=selected)
        # A body without a line can't break off, and one with a single line may arrive whole.
        empty: bool | None = answer.holds_nothing
        if fault in _BROKEN_BODIES and not empty:
            empty = None
        answer.fetched = Fetched(partition.id, asked, end, empty)
        return answer

    def _discovery(self, version: Version, at: float) -> Answer:
        body = wire.discovery(self.world, version, at, stream=self._stream)
        listed = () if at < self.world.manners.unlisted else self.world.listed(at)
        closed = tuple(p.id for p in listed if p.closed <= at)
        return Answer(200, [body], listed=tuple(p.id for p in listed), closed=closed)

    def _from_behind(
        self,
        partition: ModelPartition,
        cursor: str,
        asked: int,
        end: int,
        version: Version,
        *,
        selected: bool,
        known: bool,
    ) -> Answer:
        """Return what a replica answers that has not got as far as the cursor.

        It names its own end only to a process that has asked from there. To any other one that
        place, which is opaque, looks like progress.
        """
        ahead, dialect = self.world.manners.ahead, version.dialect
        key = self.world.manners.keys(dialect)[1]
        lines = [] if ahead == "silent" else [wire.line(partition.id, cursor, dialect, key)]
        if ahead == "tail" and known:
            lines = [wire.tail(self.world, partition, end, dialect, selected=selected)]
        answer = Answer(200, lines, f"from a replica that lags, its end is {end}")
        answer.fetched = Fetched(partition.id, asked, end, True)
        return answer

    def _sequence(
        self, partition: ModelPartition, cursor: str, at: float, *, selected: bool
    ) -> int | None:
        """Return the event that a cursor stands behind; None for a cursor of other requests."""
        if cursor == "_last":
            return self.world.end(partition, at)
        if selected:
            return partition.sequence_of_selected(cursor)
        return partition.sequence_of(cursor)

    def _version(self) -> Version:
        deployment = self.deployment
        if deployment is not None and self.now() < deployment.until:
            return self._random.choice(deployment.versions)
        return self.world.version(self.now())

    def _addressed(self, request: Asked, version: Version) -> tuple[int, str] | Answer:
        """Return partition and cursor, or the refusal of an instance of another version."""
        params = request.params
        expected = FEED_PATH + "/events" if version.dialect == "v2-token" else FEED_PATH
        if request.path != expected:
            return Answer(404, [b"not found"])
        if version.dialect == "v1":
            given = [name for name in params if name.startswith("cursor")]
            if "partition" in params or len(given) != 1 or given[0] == "cursor":
                return Answer(400, [b"handshake error: partition count missing"])
            return int(given[0].removeprefix("cursor")), params[given[0]]
        if version.dialect == "v2-token" and params.get("token") != version.token:
            return Answer(409, [b"the topology has changed"])
        if "partition" not in params:
            return Answer(400, [b"no partition"])
        return int(params["partition"]), params["cursor"]

    def _page(
        self,
        partition: ModelPartition,
        cursor: str,
        asked: int,
        at: float,
        version: Version,
        seconds: float,
        *,
        selected: bool,
    ) -> Answer:
        style, random = self._style, self._random
        page = wire.page(
            self.world,
            partition,
            asked,
            at,
            version.dialect,
            style,
            random,
            selected=selected,
            echo=cursor,
        )
        answer = Answer(200, page.lines, f"{page.events} events up to {page.reached}")
        answer.holds_nothing = not page.events and page.reached == asked
        if not page.lines and self.world.manners.empty == "204" and not seconds:
            answer.status = 204
        if seconds:
            answer.stream, answer.selected = (partition, version.dialect), selected
            answer.seconds, answer.reached = seconds, page.reached
        return answer

    # ------------------------------------------------------------------ bodies

    async def body(
        self, response: SimulatedResponse, answer: Answer, fault: FaultKind | None
    ) -> AsyncIterator[bytes]:
        """Send a body, with the fault that it has. Its end closes the response."""
        chunks, request = answer.chunks, response.request
        if answer.status == 200 and chunks and fault in _BROKEN_BODIES:
            text = b"".join(chunks)
            yield text[: self._random.randint(1, len(text))]
            self._read(answer)
            if fault == "error-text":
                yield b"Internal server error"
            if fault == "stall-body":
                await sleep(_timeout(request))
                raise httpx.ReadTimeout("simulated: silence", request=request)
            if fault == "reset":
                raise httpx.RemoteProtocolError("simulated: reset", request=request)
            response.end()
            return
        if answer.stream is not None and self.world.manners.holds_streams:
            async for chunk in self._held_back(answer):
                yield chunk
            response.end()
            return
        for chunk in chunks if fault == "slow" else self._pieces(chunks):
            if fault == "slow":
                await sleep(self._random.uniform(0.0, 1.0))
            yield chunk
        self._read(answer)
        if answer.stream is not None:
            async for chunk in self._streamed(*answer.stream, answer):
                yield chunk
        response.end()

    async def _held_back(self, answer: Answer) -> AsyncIterator[bytes]:
        """Send a stream through a proxy that waits until its buffer is full, or for the end."""
        assert answer.stream is not None
        held = b"".join(answer.chunks)
        async for chunk in self._streamed(*answer.stream, answer):
            held += chunk
            if len(held) >= _PROXY_BYTES:
                yield held
                held = b""
        if held:
            yield held
        self._read(answer)

    def _read(self, answer: Answer) -> None:
        fetched = answer.fetched
        if fetched is None:
            return
        self._observe(fetched)
        if fetched.empty is not None and answer.evidence is not None:
            answer.evidence.answered(fetched.partition, self.now(), empty=fetched.empty)

    async def _streamed(
        self, partition: ModelPartition, dialect: Dialect, answer: Answer
    ) -> AsyncIterator[bytes]:
        """Go on with what is published while the response is open."""
        until, reached = self.now() + answer.seconds, answer.reached
        while self.now() < until:
            await sleep(self._random.uniform(0.0, _STREAM_PAUSE))
            if self.now() >= partition.retired:
                return
            if self.world.end(partition, self.now()) <= reached:
                with anyio.move_on_after(until - self.now()):
                    await self.world.changed().wait()
                continue
            page = wire.page(
                self.world,
                partition,
                reached,
                self.now(),
                dialect,
                self._style,
                self._random,
                selected=answer.selected,
            )
            reached = page.reached
            for piece in self._pieces(page.lines):
                yield piece

    def _pieces(self, lines: list[bytes]) -> Iterable[bytes]:
        text, size = b"".join(lines), self._style.read_bytes
        if len(text) <= size:
            return (text,) if text else ()
        return (text[start : start + size] for start in range(0, len(text), size))


class SimulatedTransport:
    """The connections of one process of the application.

    A process that was killed is `dead`: whatever it still does reaches nobody.
    """

    def __init__(self, publisher: SimulatedPublisher) -> None:
        self.dead = False
        self.open = 0
        self.requests = 0
        """Responses that were begun and not closed."""
        self.busiest: tuple[int, str] = (0, "")
        """How often the same request was sent within one second, at most, and which one."""
        self.evidence = Evidence()
        self.passed: set[tuple[int, str]] = set()
        """The places that were asked with: see `_from_behind`."""
        self.on_fetch: Callable[[int, str], None] | None = None
        self.on_answer: Callable[[int], None] | None = None
        """Is called with the partition of each fetch that is answered without a fault."""
        self.on_listed: Callable[[Iterable[int]], None] | None = None
        """Is called with the partition and the cursor of each fetch."""
        self.listed: set[int] = set()
        """The partitions in the discoveries that were answered."""
        self._recent: dict[str, deque[float]] = {}
        self._publisher = publisher

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request in virtual time."""
        if self.dead:
            raise httpx.ConnectError("simulated: the process is gone", request=request)
        asked = _asked(request.url)
        self.count(asked.target, self._publisher.now())
        if self.on_fetch is not None and asked.partition is not None:
            self.on_fetch(asked.partition, asked.params.get("cursor", ""))
        try:
            answer, fault = await self._publisher.respond(request, asked, self.passed)
        except httpx.TransportError:
            self.evidence.failed(asked.partition, self._publisher.now())
            raise
        if answer.status >= _SERVER_ERROR:
            self.evidence.failed(asked.partition, self._publisher.now())
        self.open += 1
        answer.evidence = self.evidence
        well = answer.status == 200 and fault is None
        if well and asked.partition is not None and self.on_answer is not None:
            self.on_answer(asked.partition)
        if answer.handshake:
            self.evidence.handshake(answer.handshake, self._publisher.now())
        if answer.listed:
            self.listed.update(answer.listed)
            if self.on_listed is not None:
                self.on_listed(answer.listed)
            listed_open = set(answer.listed).difference(answer.closed)
            self.evidence.listed(answer.closed, self._publisher.now(), listed_open)
        response = SimulatedResponse(answer.status, request, self._closed, answer.headers)
        response.simulated_body = self._publisher.body(response, answer, fault)
        return response

    def _closed(self) -> None:
        self.open -= 1

    def count(self, request: str, now: float) -> None:
        """Count a request."""
        self.requests += 1
        times = self._recent.setdefault(request, deque())
        times.append(now)
        while times[0] < now - 1.0:
            times.popleft()
        if len(times) > self.busiest[0]:
            self.busiest = len(times), request


def _timeout(request: httpx.Request) -> float:
    timeout = request.extensions.get("timeout", {}).get("read")
    return REQUEST_SECONDS if timeout is None else float(timeout)


def _stream_seconds(params: dict[str, str], offered: bool) -> float:
    wanted = params.get("stream")
    if not offered or wanted is None:
        return 0.0
    return float("inf") if wanted == "y" else int(wanted) / 1000


def _partition(params: dict[str, str]) -> int | None:
    """Return the partition of a fetch; None for a discovery."""
    if "partition" in params:
        return int(params["partition"])
    given = (name.removeprefix("cursor") for name in params if name.startswith("cursor"))
    return next((int(id) for id in given if id), None)
