"""`PatientDiscovery`: a discovery that other feeds of a query don't wait for. Imports no Spark."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait

from feedapi_client.model import FeedInfo
from feedapi_client.spark.connection import FeedConnection


class PatientDiscovery:
    """Discovers a feed, in the background where that takes long.

    A discovery is retried for `RetryPolicy.give_up_after`. Where a query reads several feeds, the
    others go on meanwhile (R14). Not thread-safe.

    Arguments:
        connection: to the feed.
        patience: seconds that the caller waits for a discovery; None until it is over.
    """

    def __init__(self, connection: FeedConnection, patience: float | None) -> None:
        self._connection = connection
        self._patience = patience
        self._running: Future[FeedInfo] | None = None

    @property
    def running(self) -> bool:
        """Whether a discovery began that `next` did not return yet."""
        return self._running is not None

    def next(self, *, wait: bool) -> FeedInfo | None:
        """Return the discovery, or None while it goes on in the background.

        Arguments:
            wait: whether to wait until it is over, however long that takes.

        Raises:
            FeedError: it failed. The next call begins another one.
        """
        if self._patience is None or wait:
            return self._connection.discover()
        found = self._running or self._begin(self._patience)
        if not found.done():
            return None
        self._running = None
        return found.result()

    def _begin(self, patience: float) -> Future[FeedInfo]:
        found = self._running = Future[FeedInfo]()
        # A daemon: a process that ends does not wait for a feed that is down.
        threading.Thread(
            target=self._discover, args=(found,), name="feedapi-discovery", daemon=True
        ).start()
        wait([found], timeout=patience)
        return found

    def _discover(self, found: Future[FeedInfo]) -> None:
        try:
            found.set_result(self._connection.discover())
        except BaseException as error:  # noqa: BLE001 - `next` raises it
            found.set_exception(error)
