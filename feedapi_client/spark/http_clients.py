"""The HTTP clients of this process. Imports no Spark.

Python workers outlive a task. The next task finds connections open and certificates loaded.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from feedapi_client.http.sync import SyncTransport
from feedapi_client.spark.auth import authorize
from feedapi_client.spark.options import SourceOptions

_CAPACITY = 8


@dataclass(slots=True, eq=False)
class SharedClient:
    """One `httpx.Client` and the number of connections (`FeedConnection`) that use it."""

    transport: SyncTransport
    users: int = 0
    evicted: bool = False

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
                client = SharedClient(SyncTransport(options.url, limits=options.limits))
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
    return (options.url, options.limits, headers, header_env, credentials)


http_clients = HttpClients()
"""Those of this process."""
