"""The publisher: a feed in memory, its traffic, and a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from feedapi_client.testing.publisher.asgi import FeedApp
from feedapi_client.testing.publisher.traffic import RecordedFeed

if TYPE_CHECKING:
    from feedapi_client.testing.publisher.server import Serving


class Publisher(RecordedFeed):
    """A feed in memory, in any of the three dialects.

    The page of `feedapi_client.testing.publisher` shows the whole interface on one screen.

    Arguments:
        partitions: The number of partitions, or their ids.
        dialect: ``v1``, ``v2-draft`` or ``v2-token``.
        page_size: Maximum number of events in a response, unless the request has a hint.
        checkpoint_every: Number of events between two checkpoints.
        vary: Let two requests from one cursor differ: page size, checkpoints, and how entities are
            interleaved. The order within an entity is kept.
        seed: Make `vary` reproducible. Implies `vary`.
        stream: Offer streamed responses.
        exactly_once: What discovery says about it.
        filters: Filters of dialect v2-draft: names of payload fields, or functions by name.
        key: Finds the entity of a payload. By default the field ``entity``, else ``id``. Payloads
            without either all count as one entity.
        quirks: Deviations of real publishers.
        bearer: Bearer token that requests need.

    Concurrency: all methods may be called from any thread, and from the event loop that serves the
    publisher. None of them blocks on I/O.
    """

    _asgi: FeedApp | None = None

    @property
    def asgi(self) -> FeedApp:
        """The feed as an ASGI application, at path ``/feed``."""
        if self._asgi is None:
            self._asgi = FeedApp(self)
        return self._asgi

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one ASGI request: the publisher itself is an application too."""
        await self.asgi(scope, receive, send)

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> Serving:
        """Serve on a port, in a thread of its own.

        ``with publisher.serve() as url`` or ``async with publisher.serve() as url``, on asyncio
        and trio. The server is gone, with all its connections, when the block ends. Needs the
        extra ``testing``.
        """
        from feedapi_client.testing.publisher.server import Serving

        return Serving(self, self.asgi, host, port)

    serving = serve

    def __repr__(self) -> str:
        with self.lock:
            states = ", ".join(
                f"{log.id}{' closed' if log.closed else ''}: {len(log.seqs)} events"
                for log in self._logs.values()
                if log.listed
            )
        return f"<Publisher {self.dialect} {self.url or 'not served'} [{states}]>"
