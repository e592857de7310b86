"""The HTTP clients of this process. Imports no Spark.

Python workers outlive a task. The next task finds connections open and certificates loaded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from feedapi_client.http.sync import SyncTransport
from feedapi_client.spark.auth import authorize
from feedapi_client.spark.certificates import trusting
from feedapi_client.spark.options import SourceOptions

_CAPACITY = 32


class RequestRate:
    """A bound on the requests of this process to one feed. Thread-safe.

    Arguments:
        rate: requests a second, evenly spaced.
        clock, sleep: seconds on any monotonic clock, and how to wait on it.
    """

    def __init__(
        self,
        rate: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._interval = 1 / rate
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._next = 0.0

    def wait(self) -> None:
        """Sleep until the caller may send one request."""
        with self._lock:
            now = self._clock()
            at = max(self._next, now)
            self._next = at + self._interval
        if at > now:
            self._sleep(at - now)


@dataclass(slots=True, eq=False)
class SharedClient:
    """One `httpx.Client` and the number of connections (`FeedConnection`) that use it."""

    transport: SyncTransport
    users: int = 0
    evicted: bool = False
    rate: RequestRate | None = None

    @property
    def http(self) -> Any:
        """The `httpx.Client`. It may be used until it is released."""
        return self.transport.client


class HttpClients:
    """Clients shared by all who read with equal options. Thread-safe.

    At most `capacity` clients are kept for later. The least recently used one beyond that is
    closed: at once when nobody uses it, else when its last user releases it.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._clients: dict[Any, SharedClient] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._clients)

    def acquire(self, options: SourceOptions) -> SharedClient:
        """Return the client for such options, with fresh credentials. Call `release` after use.

        Raises:
            OptionError: the credentials are not available in this process.
        """
        key = _key(options)
        with self._lock:
            client = self._clients.pop(key, None)
            if client is None:
                rate, trusted = options.max_requests_per_second, options.ca_certificates
                verify = None if trusted is None else trusting(trusted)
                client = SharedClient(
                    SyncTransport(options.url, limits=options.limits, verify=verify),
                    rate=None if rate is None else RequestRate(rate),
                )
            self._clients[key] = client
            client.users += 1
            self._evict()
        try:
            authorize(client.http, options)
        except BaseException:
            self.release(client)
            raise
        return client

    def release(self, client: SharedClient) -> None:
        """Give the client back. It stays open for the next user, unless it was evicted."""
        with self._lock:
            client.users -= 1
            if client.evicted and client.users == 0:
                client.transport.close()

    def close(self) -> None:
        """Close all clients, also those in use."""
        with self._lock:
            while self._clients:
                self._clients.popitem()[1].transport.close()

    def _evict(self) -> None:
        while len(self._clients) > self._capacity:
            client = self._clients.pop(next(iter(self._clients)))
            client.evicted = True
            if client.users == 0:
                client.transport.close()


def _key(options: SourceOptions) -> Any:
    headers = tuple(sorted(options.headers.items()))
    header_env = tuple(sorted(options.header_env.items()))
    credentials = (options.auth_env, options.auth_callable)
    rate = options.max_requests_per_second
    trusted = options.ca_certificates
    return (options.url, options.limits, headers, header_env, credentials, rate, trusted)


http_clients = HttpClients()
"""Those of this process."""
