"""When to discover again (R10), and for how long a discovery may fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from feedapi_client.errors import AuthenticationError, FeedError, NegotiationError, StoreError
from feedapi_client.http.transport import backoff
from feedapi_client.options import RetryPolicy

GAP_SECONDS = 0.05
"""Between two discoveries, however many ask for one."""
UNKNOWN_COMMAND_GAP_SECONDS = 5.0
"""Between two discoveries that only an unknown command asks for."""


class Rediscovery:
    """Runs `discover` every `interval` seconds, and soon after it was asked to. `wanted`: somebody asked, and no discovery that began since has succeeded.

    A failed discovery is reported and tried again, with backoff; the topology stays as it was. It is fatal only where something is `blocked` by it: at once
    when the feed refuses us or is no feed any more, otherwise after `RetryPolicy.give_up_after`.
    """

    def __init__(self, interval: float, retry: RetryPolicy) -> None:
        self.wanted = False
        self._interval = interval
        self._retry = retry
        self._again = False
        self._last = 0.0
        self._next = 0.0
        self._sooner = anyio.Event()

    def soon(self) -> None:
        """Something depends on a new discovery."""
        self.wanted = self._again = True
        self._by(max(anyio.current_time(), self._last + GAP_SECONDS))

    def perhaps(self) -> None:
        """A new discovery may tell something new."""
        self._by(max(anyio.current_time(), self._last + UNKNOWN_COMMAND_GAP_SECONDS))

    def done(self) -> None:
        """A discovery has succeeded."""
        self.wanted, self._again = self._again, False
        self._last = anyio.current_time()
        self._next = self._last + (GAP_SECONDS if self.wanted else self._interval)

    async def run(
        self,
        discover: Callable[[], Awaitable[None]],
        blocked: Callable[[], bool],
        report: Callable[[str], None],
    ) -> None:
        """Until cancelled. Raises `StoreError`, and the error of a discovery that something is blocked by."""
        failing_since: float | None = None
        failures = 0
        while True:
            await self._pause()
            self._again, self._next = False, float("inf")
            try:
                await discover()
            except StoreError:
                raise
            except FeedError as error:
                failures += 1
                failing_since = failing_since or anyio.current_time()
                report(
                    f"keeps its last good topology: {error.message if error.partition is None else error}"
                )
                self._check(error, failing_since, blocked())
                self._last = anyio.current_time()
                self._next = self._last + max(GAP_SECONDS, backoff(self._retry, failures, error))
            else:
                failing_since, failures = None, 0

    async def _pause(self) -> None:
        while (pause := self._next - anyio.current_time()) > 0:
            self._sooner = anyio.Event()
            with anyio.move_on_after(pause):
                await self._sooner.wait()

    def _by(self, when: float) -> None:
        if when < self._next:
            self._next = when
            self._sooner.set()

    def _check(self, error: FeedError, since: float, blocked: bool) -> None:
        limit = self._retry.give_up_after
        given_up = limit is not None and anyio.current_time() - since >= limit
        if blocked and (given_up or isinstance(error, (AuthenticationError, NegotiationError))):
            raise error
