"""The publisher: a feed that answers requests, in process as an ASGI application or on a port."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

from feedapi_client.testing.publisher.answers import answer, discovery
from feedapi_client.testing.publisher.asgi import CONNECTION, send_response
from feedapi_client.testing.publisher.faults import Status
from feedapi_client.testing.publisher.feed import Feed
from feedapi_client.testing.publisher.messages import Request, Response, parse_request
from feedapi_client.testing.publisher.rules import Fault, FaultRule, FaultTarget

if TYPE_CHECKING:
    from feedapi_client.testing.publisher.server import Serving


class Publisher(Feed):
    """A feed in memory, in any of the three dialects.

    The page of `feedapi_client.testing.publisher` shows the whole interface on one screen.

    Arguments:
        partitions: The number of partitions, or their ids.
        dialect: ``v1``, ``v2-draft`` or ``v2-token``.
        page_size: Maximum number of events in a response, unless the request has a hint.
        checkpoint_every: Number of events between two checkpoints.
        vary: Let two requests from one cursor differ: page size, checkpoints, and how the entities
            between two checkpoints are interleaved. The order within an entity is kept.
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

    def discovery(self) -> dict[str, Any]:
        """Return the discovery object as it is sent in the present dialect."""
        with self.lock:
            return discovery(self, self.at(self.clock()))

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
            on: The requests concerned, and of fetches only those of a `partition`.
            times: How many requests fail, after so many that don't; None: all from now on.
            seconds: Let it last for so long instead of a number of `times`, from now on.
            share: The part of the matching requests that fail, drawn at random.
        """
        until = inf
        if seconds is not None:
            times, until = None, self.clock() + seconds
        draw = self.random.random
        chosen = Status(fault) if isinstance(fault, int) else fault
        rule = FaultRule(chosen, on, partition, times, after, until, share, draw)
        with self.lock:
            self._rules.append(rule)
        return rule

    def respond(self, request: Request) -> Response:
        """Record a request and return what to send: its answer, or what a fault makes of it."""
        with self.lock:
            rule = self.arrived(request)
            response = answer(self, request, self.clock())
            if rule is not None:
                response = rule.fault(response, request, self)
            request.status = response.status
            self.counters[f"{request.kind} {response.status}"] += 1
            return response

    @property
    def asgi(self) -> Publisher:
        """The feed as an ASGI application, at path ``/feed``: the publisher itself."""
        return self

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return

        async def counted(message: Any) -> None:
            await send(message)
            self.bytes_sent += len(message.get("body", b""))

        response = self.respond(parse_request(self.path, scope, self.clock()))
        self.count_in_flight(1)
        try:
            await send_response(response, receive, counted, scope.get(CONNECTION))
        finally:
            self.count_in_flight(-1)

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> Serving:
        """Serve on a port, in a thread of its own.

        ``with publisher.serve() as url`` or ``async with publisher.serve() as url``, on asyncio
        and trio. The server is gone, with all its connections, when the block ends. Needs the
        extra ``testing``.
        """
        from feedapi_client.testing.publisher.server import Serving

        return Serving(self, host, port)

    serving = serve
