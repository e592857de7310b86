"""Requests of an examination, one after the other and bounded in number, bytes and time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

import anyio
import httpx

from feedapi_client.cli.doctor.bounds import Bounds
from feedapi_client.cli.doctor.probe_messages import ProbeProblem, ProbeRequest, ProbeResponse
from feedapi_client.errors import FeedUnavailableError
from feedapi_client.http.decompression import CodingError, Decompressor
from feedapi_client.http.endpoint import Endpoint, retry_after
from feedapi_client.http.http_errors import (
    described,
    host_problem,
    request_of_location,
    the_error,
)
from feedapi_client.http.redaction import hide_secrets
from feedapi_client.http.urls import origin
from feedapi_client.protocol.text import excerpt
from feedapi_client.retry import Backoff

_MAX_REDIRECTS = 5


class Prober:
    """Asks one feed.

    Arguments:
        transport: makes requests, with all credentials.
        anonymous: the same without credentials; None where none are known.
        bounds: what the examination may cost.
        secrets: values of headers, which a publisher may echo.
    """

    def __init__(
        self,
        transport: Endpoint,
        anonymous: Endpoint | None,
        bounds: Bounds,
        secrets: Iterable[str] = (),
    ) -> None:
        self._transport = transport
        self._anonymous = anonymous
        self._secrets = {word for value in secrets for word in (value, *value.split())}
        self.bounds = bounds
        self.requests = 0
        """Requests so far."""
        self.bytes = 0
        """Bytes received so far, of bodies as they were sent."""
        self.failures: list[ProbeResponse] = []
        """The answers after which a request was repeated, or would have been."""
        self._unanswered = 0

    @property
    def feed(self) -> str:
        """The feed's URL without secrets."""
        return self._transport.feed

    @property
    def has_credentials(self) -> bool:
        """Whether requests can be made with and without credentials."""
        return self._anonymous is not None

    def quote(self, body: bytes) -> str:
        """Return an excerpt of what a publisher sent, without secrets."""
        return excerpt(body, self.hide)

    def hide(self, text: str) -> str:
        """Return a text without secrets."""
        return hide_secrets(self._transport.hide(text), self._secrets)

    async def ask(self, question: ProbeRequest) -> ProbeResponse:
        """Make a request, again after a failure that may pass. Never raises for what comes."""

        bounds = self.bounds
        failures = Backoff(base_delay=bounds.base_delay, max_delay=1.0, attempts=bounds.attempts)
        limits = Backoff(
            base_delay=bounds.limited_base_delay,
            max_delay=4.0,
            max_retry_after=bounds.max_retry_after,
            attempts=bounds.limited_attempts,
        )
        while True:
            answer = await self._ask_once(question)
            if not answer.may_pass:
                break
            self.failures.append(answer)
            if self._exhausted:
                break
            try:
                pause = (limits if answer.limited else failures).pause(self._failure(answer))
            except FeedUnavailableError:
                break
            await anyio.sleep(pause)
        if answer.asked:
            self._unanswered = self._unanswered + 1 if answer.unanswered else 0
        return answer

    def _failure(self, answer: ProbeResponse) -> FeedUnavailableError:
        asked = {name.lower(): value for name, value in answer.headers.items()}
        wait = retry_after(asked.get("retry-after"), asked.get("date"))
        return FeedUnavailableError(str(answer), feed=self.feed, retry_after=wait)

    @property
    def _exhausted(self) -> bool:
        bounds = self.bounds
        return (
            self.requests >= bounds.max_requests
            or self.bytes >= bounds.max_bytes
            or self._unanswered >= bounds.unanswered
        )

    async def _ask_once(self, question: ProbeRequest) -> ProbeResponse:
        transport = self._anonymous if question.anonymous else self._transport
        if self._exhausted or transport is None:
            return ProbeResponse(question=question, problem=ProbeProblem.NOT_ASKED)
        started = time.monotonic()
        seconds = self.bounds.timeout + (question.seconds or 0.0)
        receiving = _Receiving(self, transport, question, started)
        with anyio.move_on_after(seconds) as scope:
            await receiving.run()
        if scope.cancelled_caught:
            receiving.problem, receiving.detail = ProbeProblem.SLOW, f"{seconds:g} s"
        return receiving.answer(time.monotonic() - started)


class _Receiving:
    """Receives the response to one request. What came so far is kept when it fails."""

    def __init__(
        self, prober: Prober, transport: Endpoint, question: ProbeRequest, started: float
    ) -> None:
        self._started = started
        self._first_byte: float | None = None
        self._prober = prober
        self._transport = transport
        self._question = question
        self._body = bytearray()
        self._response: httpx.Response | None = None
        self._redirects = 0
        self._cut = False
        self._ended = False
        self.problem: ProbeProblem | None = None
        self.detail = ""

    async def run(self) -> None:
        try:
            response = await self._send()
            if response is not None:
                self._response = response
                await self._receive(response)
        except CodingError as failed:
            self.problem, self.detail = ProbeProblem.CODING, str(failed)
        except Exception as failed:  # noqa: BLE001 - whatever comes out of the client
            error = the_error(failed)
            if isinstance(failed, httpx.InvalidURL) or request_of_location(failed) is not None:
                self.problem, self.detail = ProbeProblem.REDIRECT, "to a URL that can't be read"
                return
            silent = self._response is None
            self.problem = ProbeProblem.NO_ANSWER if silent else ProbeProblem.BROKEN
            self.detail = self._prober.quote((host_problem(error) or described(error)).encode())

    def answer(self, seconds: float) -> ProbeResponse:
        response, body = self._response, bytes(self._body)
        refused = response is not None and self.problem is None and not response.is_success
        return ProbeResponse(
            question=self._question,
            status=None if response is None else response.status_code,
            headers={} if response is None else dict(response.headers),
            body=body,
            problem=self.problem,
            detail=self._prober.quote(body.strip()) if refused else self.detail,
            cut=self._cut,
            ended=self._ended,
            seconds=seconds,
            first_byte=self._first_byte,
            redirects=self._redirects,
        )

    async def _send(self) -> httpx.Response | None:
        """Return the response, after redirects within the origin of the feed."""
        transport, question = self._transport, self._question
        request = transport.request(question.suffix, question.params, partition=question.partition)
        if question.identity:
            request.headers["Accept-Encoding"] = "identity"
        home = origin(request.url)
        for _ in range(_MAX_REDIRECTS + 1):
            self._prober.requests += 1
            response: httpx.Response = await transport.io.send(request, transport.auth(request))
            if response.next_request is None:
                return response
            await response.aclose()
            request = response.next_request
            try:
                away = origin(request.url) != home
            except ValueError as error:  # a host name that idna refuses
                raise httpx.InvalidURL("") from error
            if away:
                self.problem, self.detail = ProbeProblem.REDIRECT, "to another origin"
                return None
            self._redirects += 1
        self.problem, self.detail = ProbeProblem.REDIRECT, f"more than {_MAX_REDIRECTS} times"
        return None

    async def _receive(self, response: httpx.Response) -> None:
        # The time of a stream is over without a problem; that of the whole request is one.
        limit = self._question.seconds
        with anyio.move_on_after(float("inf") if limit is None else limit) as scope:
            try:
                await self._read(response)
            finally:
                with anyio.CancelScope(shield=True):
                    await response.aclose()
        if scope.cancelled_caught:
            self._cut = True

    async def _read(self, response: httpx.Response) -> None:
        coding = Decompressor(response.headers.get("content-encoding", ""))
        chunks: Any = response.aiter_raw()
        async with aclosing(chunks) as received:
            await self._decode(received, coding)

    async def _decode(self, received: AsyncIterator[bytes], coding: Decompressor) -> None:
        prober, limit = self._prober, self._question.max_bytes
        async for chunk in received:
            prober.bytes += len(chunk)
            if chunk and self._first_byte is None:
                self._first_byte = time.monotonic() - self._started
            for piece in coding.feed(chunk):
                self._body += piece
                if len(self._body) > limit:
                    self._cut = True
                    del self._body[limit:]
                    return
            if prober.bytes >= prober.bounds.max_bytes:
                self._cut = True
                return
        coding.finish()
        self._ended = True
