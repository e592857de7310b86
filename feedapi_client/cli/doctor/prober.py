"""Requests of an examination: one after the other, bounded in number, bytes and time."""

from __future__ import annotations

import random
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

import anyio
import httpx

from feedapi_client import __version__
from feedapi_client.causes import network_problem
from feedapi_client.errors import FeedError
from feedapi_client.http.decompression import ACCEPT_ENCODING, CodingError, Decompressor
from feedapi_client.http.redaction import header_secrets
from feedapi_client.http.transport import retry_after
from feedapi_client.http.urls import FeedURL
from feedapi_client.options import Limits
from feedapi_client.protocol.text import excerpt, hide_secrets

A = TypeVar("A", bound="Answer")
_MAX_REDIRECTS = 5
_NO_SECRETS = {"host", "accept", "accept-encoding", "cache-control", "connection", "user-agent"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one examination may cost, and how patient it is. Times are seconds."""

    max_requests: int = 120
    max_bytes: int = 32 * 1024**2  # received in total; one chunk may come on top
    page_bytes: int = 1024**2
    timeout: float = 10.0
    partitions: int = 6  # that are read, of those that the feed lists
    pages: int = 4  # that are read of each of these, from its first event on
    unanswered: int = 3  # requests without an answer, one after the other, that end it
    max_retry_after: float = 5.0
    pauses: float = 1.0  # a factor on the pauses between attempts
    stream_milliseconds: int = 400


class Problem(StrEnum):
    NO_ANSWER = "no answer"
    BROKEN = "the response broke off"
    SLOW = "not complete in time"
    CODING = "the content coding can't be undone"
    REDIRECT = "redirected to where no credentials are sent"
    NOT_ASKED = "not asked: the bounds of this examination are reached"


@dataclass(slots=True, eq=False)
class Answer:
    """A GET, and what came, also where it failed. Without a partition it is a discovery.

    `what` names it in findings. With `lasts` a streamed response is read for so many seconds, and
    that they are over is no problem. Status 0 is no response.
    """

    what: str
    partition: int | None = None
    asked: str = ""  # the cursor
    suffix: str = ""
    params: dict[str, str] = field(default_factory=dict)
    lasts: float = 0.0
    identity: bool = False  # no content coding is accepted
    anonymous: bool = False
    status: int = field(init=False, default=0)
    headers: httpx.Headers = field(init=False, default_factory=httpx.Headers)
    body: bytearray = field(init=False, default_factory=bytearray)
    problem: Problem | None = field(init=False, default=None)
    detail: str = field(init=False, default="")
    cut: bool = field(init=False, default=False)  # more would have come, which was not read
    ended: bool = field(init=False, default=False)
    seconds: float = field(init=False, default=0.0)
    first_byte: float = field(init=False, default=0.0)  # seconds until then
    redirects: int = field(init=False, default=0)
    recovered: bool = field(init=False, default=False)  # it failed, and a repetition did not

    @property
    def ok(self) -> bool:
        """Whether it is a complete response with a status of success, apart from a cut."""
        return self.problem is None and self.status // 100 == 2

    @property
    def may_pass(self) -> bool:
        if self.problem is not None:
            return self.problem in (Problem.NO_ANSWER, Problem.BROKEN, Problem.SLOW)
        return self.status >= 500 or self.status in (408, 425, 429)

    @property
    def limited(self) -> bool:
        later = self.status == 429 or (self.status == 503 and "retry-after" in self.headers)
        return self.problem is None and later

    @property
    def refused(self) -> bool:
        return self.problem is None and self.status in (400, 404, 409, 410)

    def __str__(self) -> str:
        detail = self.detail
        if self.problem is not None:
            return f"{self.problem} ({detail})" if detail else str(self.problem)
        return f"status {self.status}{': ' if detail else ''}{detail}"


class Prober:
    """Asks one feed, by a client with all credentials but those in the URL, and by one without.

    `failures` are answers after which a request was repeated, or would have been.
    """

    def __init__(
        self, url: str, client: httpx.AsyncClient, anonymous: httpx.AsyncClient, bounds: Bounds
    ) -> None:
        self._url = FeedURL.parse(url)
        self._client, self._anonymous, self.bounds = client, anonymous, bounds
        pair = self._url.basic_auth
        self._auth = client.auth or (None if pair is None else httpx.BasicAuth(*pair))
        self.knows_credentials = self._auth is not None or client.headers != anonymous.headers
        self._secrets = set(self._url.secrets)
        self.feed = self._url.public
        self.requests = self.bytes = self._unanswered = 0
        self.failures: list[Answer] = []

    def hide(self, text: str) -> str:
        return hide_secrets(text, self._secrets)

    async def ask(self, request: A) -> A:
        """Make a request, again after a failure that may pass. Never raises for what comes."""
        failed: list[Answer] = []
        while (answer := await self._ask_once(replace(request))).may_pass:
            failed.append(answer)
            attempts = sum(each.limited is answer.limited for each in failed)
            if self._exhausted or attempts == (6 if answer.limited else 3):
                break
            floor = retry_after(answer.headers.get("retry-after"), answer.headers.get("date")) or 0
            pause = random.uniform(0, 0.1 * 2**attempts) + min(floor, self.bounds.max_retry_after)
            await anyio.sleep(self.bounds.pauses * pause)
        for each in failed:
            each.recovered = answer.ok
        self.failures += failed
        silent = answer.problem in (Problem.NO_ANSWER, Problem.SLOW) and not answer.status
        if answer.problem is not Problem.NOT_ASKED:
            self._unanswered = self._unanswered + 1 if silent else 0
        return answer

    @property
    def _exhausted(self) -> bool:
        bounds = self.bounds
        some = self.requests >= bounds.max_requests or self.bytes >= bounds.max_bytes
        return some or self._unanswered >= bounds.unanswered

    async def _ask_once(self, answer: A) -> A:
        if self._exhausted:
            answer.problem = Problem.NOT_ASKED
            return answer
        started, seconds = time.monotonic(), self.bounds.timeout + answer.lasts
        with anyio.move_on_after(seconds) as scope:
            try:
                await self._receive(answer, started)
            except Exception as error:  # noqa: BLE001 - whatever comes out of the client
                answer.problem, text = _classified(error, answer)
                answer.detail = excerpt(text.encode(), self.hide)
        if scope.cancelled_caught:
            answer.problem, answer.detail = Problem.SLOW, f"{seconds:g} s"
        answer.seconds = time.monotonic() - started
        if answer.problem is None and not answer.ok:
            answer.detail = excerpt(bytes(answer.body.strip()), self.hide)
        return answer

    async def _receive(self, answer: Answer, started: float) -> None:
        response = await self._send(answer)
        answer.status, answer.headers = response.status_code, response.headers
        with anyio.move_on_after(answer.lasts or float("inf")) as scope:
            try:
                await self._read(answer, response, started)
            finally:
                with anyio.CancelScope(shield=True):
                    await response.aclose()
        answer.cut = answer.cut or scope.cancelled_caught

    async def _send(self, answer: Answer) -> httpx.Response:
        auth, client = (None, self._anonymous) if answer.anonymous else (self._auth, self._client)
        target = self._url.target(answer.suffix, list(answer.params.items()))
        coding = "identity" if answer.identity else ACCEPT_ENCODING
        headers = {"Accept-Encoding": coding, "User-Agent": f"feedapi-client/{__version__}"}
        if answer.partition is None:
            headers["Cache-Control"] = "no-cache"
        client.cookies.clear()  # one of a load balancer would keep asking the same replica
        request = client.build_request("GET", self._url.request_url(target), headers=headers)
        while answer.redirects <= _MAX_REDIRECTS:
            self.requests += 1
            try:
                response = await client.send(request, stream=True, auth=auth)
            finally:  # an auth may have put in more
                sent = [each for each in request.headers.items() if each[0] not in _NO_SECRETS]
                self._secrets.update(*(header_secrets(value, name) for name, value in sent))
            if response.next_request is None:
                return response
            await response.aclose()
            request, origin = response.next_request, None
            with suppress(FeedError):
                origin = FeedURL.parse(str(request.url)).origin
            if origin != self._url.origin:
                raise _RedirectError("to another origin")
            answer.redirects += 1
        raise _RedirectError(f"more than {_MAX_REDIRECTS} times")

    async def _read(self, answer: Answer, response: httpx.Response, started: float) -> None:
        coding = Decompressor(response.headers.get("content-encoding", ""))
        discovery = answer.partition is None
        limit = Limits().max_discovery_bytes if discovery else self.bounds.page_bytes
        chunks: Any = response.aiter_raw()
        async with aclosing(chunks):
            async for chunk in chunks:
                self.bytes += len(chunk)
                answer.first_byte = answer.first_byte or time.monotonic() - started
                for piece in coding.feed(chunk):
                    answer.body += piece
                    if len(answer.body) > limit:
                        break
                answer.cut = len(answer.body) > limit or self.bytes >= self.bounds.max_bytes
                if answer.cut:
                    del answer.body[limit:]
                    return
        coding.finish()
        answer.ended = True


class _RedirectError(Exception):
    """A redirect that is not followed."""


def _classified(error: Exception, answer: Answer) -> tuple[Problem, str]:
    """Return what an error means. Nothing quotes what was received."""
    if isinstance(error, (CodingError, _RedirectError)):
        return Problem.CODING if isinstance(error, CodingError) else Problem.REDIRECT, str(error)
    text = str(error) if isinstance(error, httpx.TransportError) else ""
    if isinstance(error, (httpx.InvalidURL, UnicodeError)) or "location header" in text:
        return Problem.REDIRECT, "to a URL that can't be read"
    said = network_problem(error) or ("" if "b'" in text or 'b"' in text else text)
    said = error.message if isinstance(error, FeedError) else said
    named = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return Problem.BROKEN if answer.status else Problem.NO_ANSWER, named
