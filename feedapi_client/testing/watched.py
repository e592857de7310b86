"""What a publisher notes of its traffic, and the faults that wait for it."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

import anyio

from feedapi_client.testing.exchange import Request
from feedapi_client.testing.rules import FaultRule

KEPT_REQUESTS = 20_000


class Watched:
    """Requests, counted and kept, and the rules that let them fail. `lock` guards the whole publisher."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.counters: Counter[str] = Counter()
        self.in_flight = 0
        self.max_in_flight = 0
        self.bytes_sent = 0
        self._rules: list[FaultRule] = []
        self._requests: deque[Request] = deque(maxlen=KEPT_REQUESTS)

    def heal(self) -> None:
        """Remove all faults."""
        with self.lock:
            self._rules.clear()

    @property
    def faults(self) -> list[FaultRule]:
        """The faults that are still to strike."""
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

    def arrived(self, request: Request) -> FaultRule | None:
        """Note a request; the fault that strikes it, if any. The caller holds the lock."""
        self._requests.append(request)
        self.counters[request.kind] += 1
        struck = next((rule for rule in self._rules if rule.strikes(request)), None)
        self._rules = [rule for rule in self._rules if rule.live]
        return struck

    def under_way(self, change: int) -> None:
        """Note that a response begins (1) or ends (-1)."""
        with self.lock:
            self.in_flight += change
            self.max_in_flight = max(self.max_in_flight, self.in_flight)
