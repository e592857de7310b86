"""The traffic of a publisher: its requests, its counters, and the rules of its faults."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from random import Random
from threading import RLock
from time import monotonic

import anyio

from feedapi_client.testing.publisher.faults import as_fault
from feedapi_client.testing.publisher.faults.rules import Fault, FaultRule, FaultTarget
from feedapi_client.testing.publisher.feed import Feed
from feedapi_client.testing.publisher.requests import Request
from feedapi_client.testing.publisher.responses import Response, text_response

KEPT_REQUESTS = 20_000


@dataclass(slots=True)
class RateLimit:
    """So many requests a second are answered, of all clients together; the others are refused.

    Attributes:
        per_second: requests a second.
        burst: how many may come at once after a pause.
        status: of a refusal, usually 429 or 503.
        retry_after: the header ``Retry-After`` of a refusal, None for none.
    """

    per_second: float
    burst: int = 1
    status: int = 429
    retry_after: int | str | None = None
    _left: float = field(default=inf, repr=False)
    _since: float = field(default=0.0, repr=False)

    def refusal(self, now: float) -> Response | None:
        """Count a request; return its refusal when it is one too many."""
        grown = self._left + (now - self._since) * self.per_second
        self._left, self._since = min(grown, float(self.burst)), now
        if self._left >= 1.0:
            self._left -= 1.0
            return None
        response = text_response(self.status, "too many requests\n")
        if self.retry_after is not None:
            response.headers["retry-after"] = str(self.retry_after)
        return response


class Traffic:
    """Records requests, and applies the rules of faults to them.

    It is a base of `Publisher`, whose lock it uses.
    """

    lock: RLock
    _random: Random

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.in_flight = 0
        self.max_in_flight = 0
        self.bytes_sent = 0
        self.rate_limit: RateLimit | None = None
        self._rules: list[FaultRule] = []
        self._requests: deque[Request] = deque(maxlen=KEPT_REQUESTS)

    def fail(
        self,
        fault: int | Fault,
        *,
        on: FaultTarget = "fetch",
        partition: int | None = None,
        times: int | None = 1,
        after: int = 0,
        seconds: float | None = None,
        share: float = 1.0,
    ) -> FaultRule:
        """Let requests fail.

        Arguments:
            fault: What goes wrong; an int is an error status.
            on: The requests concerned: ``fetch``, ``discovery`` or ``any``.
            partition: Only fetches of this partition.
            times: How many requests fail; None: all from now on.
            after: How many matching requests are answered as usual first.
            seconds: Let it last for so long instead of a number of `times`, from now on.
            share: The part of the matching requests that fail, drawn at random.
        """
        rule = FaultRule(
            as_fault(fault),
            on=on,
            partition=partition,
            times=times if seconds is None else None,
            after=after,
            until=inf if seconds is None else monotonic() + seconds,
            share=share,
            random=self._random,
        )
        with self.lock:
            self._rules.append(rule)
        return rule

    def heal(self) -> None:
        """Remove all faults."""
        with self.lock:
            self._rules.clear()

    @property
    def faults(self) -> list[FaultRule]:
        """The faults that may still apply."""
        with self.lock:
            return [rule for rule in self._rules if rule.live]

    @property
    def requests(self) -> list[Request]:
        """The requests so far, oldest first (the last 20,000)."""
        with self.lock:
            return list(self._requests)

    def clear_requests(self) -> None:
        """Forget the requests and counters."""
        with self.lock:
            self._requests.clear()
            self.counters.clear()
            self.max_in_flight, self.bytes_sent = self.in_flight, 0

    async def wait(self, predicate: Callable[[], object], timeout: float = 10.0) -> None:
        """Wait until `predicate()` is true. Raises TimeoutError after `timeout` seconds."""
        with anyio.fail_after(timeout):
            while not predicate():  # noqa: ASYNC110 - any predicate, over state of any thread
                await anyio.sleep(0.002)

    def record_request(self, request: Request, *, refused: bool = False) -> FaultRule | None:
        """Record a request and return the fault that applies to it, if any.

        None applies to one that the rate limit has `refused`. The caller holds the lock.
        """
        self._requests.append(request)
        self.counters[request.kind] += 1
        if refused:
            self.counters["refused"] += 1
            return None
        applied = next((rule for rule in self._rules if rule.applies_to(request)), None)
        self._rules = [rule for rule in self._rules if rule.live]
        return applied

    def count_in_flight(self, change: int) -> None:
        """Record that a response begins (1) or ends (-1)."""
        with self.lock:
            self.in_flight += change
            self.max_in_flight = max(self.max_in_flight, self.in_flight)


class RecordedFeed(Feed, Traffic):
    """A feed with its traffic: what is served."""

    url: str | None = None
    """Where it is served; None while it is not."""
