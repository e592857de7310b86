"""An in-memory FeedAPI publisher: what consumers are tested and demonstrated against.

::

    from feedapi_client.testing import Publisher

    publisher = Publisher(partitions=2, dialect="v2-token", page_size=100, checkpoint_every=10)
    publisher.append(0, {"entity": "a", "n": 1})        # -> the cursor behind it
    with publisher.serve() as url:                       # or: async with, on asyncio and trio
        ...                                              # http://127.0.0.1:PORT/feed
        publisher.split(0, into=(2, 3), method="starts-after")
        publisher.publish("a", {"entity": "a", "n": 2})  # goes to the partition where entity a lives now
        publisher.fail(503, times=2)                     # see feedapi_client.testing.faults

API::

    Publisher(partitions: int | Iterable[int] = 1, *, dialect="v2-token", page_size=1000, checkpoint_every=100, vary=False, seed=None,
              stream=False, exactly_once=True, filters: Iterable[str] | Mapping[str, (payload, value) -> bool] = (), key=None, quirks=Quirks(), bearer=None)

    Events
      append(partition, payload, *, headers=None, entity=None) -> str     payload: dict, str, or bytes (JSON, sent verbatim); returns the cursor behind it
      extend(partition, payloads) -> str                                  many at once, fast
      append_internal(partition, count=1) -> str                          never shown: they only move the cursor
      publish(entity, payload, *, headers=None) -> tuple[int, str]        append to where the entity lives now -> (partition, cursor)
      route(entity, payload=None) -> int                                  that partition
      payloads(partition=None) -> list                                    what was published, decoded: a partition's, or all of the feed in order
      end_cursor(partition) -> str                                        the cursor behind the last event; what `_last` and lastCursor mean
    Topology (each changes the token, unless Quirks.keep_token)
      close(partition); reopen(partition)
      split(partition, into=2 | ids, *, method="starts-after" | "cursor-from", key=None) -> tuple[int, ...]
      merge(partitions, into=None) -> int
      add(partition=None, *, starts_after=None, cursor_from=(), closed=False) -> int     any topology, illegal ones too
      remove(partition)                                                   no longer listed; add(partition) lists it again with its events
      rotate_token() -> str
      upgrade(dialect)                                                    same as assigning `dialect`; cursors carry over
      partitions -> dict[int, Partition]; open_partitions() -> list[int]; discovery() -> dict; token -> str
    Settings that may be assigned at any time: dialect, page_size, checkpoint_every, scan_limit, vary, stream, exactly_once, filters, key, quirks,
      bearer (requests without that bearer token 401, with another 403), require_query ({name: value}, else 403), type_field ("type")
    Faults: fail(fault, *, on="fetch" | "discovery" | "any", partition=None, times=1 | None, after=0) -> FaultRule; heal(); faults -> list[FaultRule]
    Watching: requests -> list[Request] (kind, partition, cursor, token, query, headers, path, time, status); clear_requests()
      counters ("discovery", "fetch", "fetch 409" ...); in_flight, max_in_flight (responses under way); bytes_sent (of bodies)
      await wait(predicate, timeout=10.0)                                 until predicate() is true; asyncio and trio
    Serving: serve(host="127.0.0.1", port=0) -> Serving (async and plain context manager giving the URL); serving = serve; url; asgi (the ASGI app)

Faults (module `feedapi_client.testing.faults`; an int is `Status`): Status(code, body, headers), Redirect(location, code), Html(), Replace(json or bytes),
Edit(change the discovery), Rewrite(bytes -> bytes), Reset(after_bytes, after_lines), Truncate(after_bytes, after_lines, chunked), BrokenChunk(),
CutLine(after_lines, text), ErrorText(after_lines), NoFinalNewline(), NoCheckpoint(keep), SameCheckpoint(), EmptyPage(moving), EndlessLine(), EndlessRun(),
UnknownCommands(commands), ExtraFields(), Delay(seconds), Hang(after_bytes, after_lines), Trickle(piece, interval), Gzip(), Both((fault, fault, ...)),
or a function of your own.

A cursor-from split redistributes the whole history. When it hits a partition that itself starts after another one, discovery can't say both (the
specification allows one mechanism), so a consumer that has not read the older partition yet loses the order between the two. Avoid it where order is what
is tested.

All methods may be called from any thread, and from the event loop that serves the publisher; none of them blocks on I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from feedapi_client.testing.asgi import FeedApp
from feedapi_client.testing.entities import Payload as Payload
from feedapi_client.testing.entities import default_key as default_key
from feedapi_client.testing.faults import Fault, FaultRule, FaultTarget, as_fault
from feedapi_client.testing.feed import DIALECTS as DIALECTS
from feedapi_client.testing.feed import Filter as Filter
from feedapi_client.testing.feed import PublishedFeed
from feedapi_client.testing.feed import SplitMethod as SplitMethod
from feedapi_client.testing.watched import KEPT_REQUESTS as KEPT_REQUESTS

if TYPE_CHECKING:
    from feedapi_client.testing.server import Serving


class Publisher(PublishedFeed):
    """A feed in memory, in any of the three dialects. See the module's page for the whole interface.

    `vary` makes two requests from one cursor differ (page size, checkpoints, interleaving of entities; the order within an entity is kept); `seed` makes
    that reproducible and implies it. `key` finds the entity of a payload; by default the field ``entity``, else ``id``; payloads without either all count
    as one entity.
    """

    url: str | None = None
    """Where it is served; None while it is not."""
    _asgi: FeedApp | None = None

    def fail(
        self,
        fault: int | Fault,
        *,
        on: FaultTarget = "fetch",
        partition: int | None = None,
        times: int | None = 1,
        after: int = 0,
    ) -> FaultRule:
        """Let requests fail: `times` of them (None: all from now on), the first `after` matching ones spared. An int is an error status."""
        rule = FaultRule(as_fault(fault), on=on, partition=partition, times=times, after=after)
        with self.lock:
            self._rules.append(rule)
        return rule

    @property
    def asgi(self) -> FeedApp:
        """The feed as an ASGI application, at path ``/feed``."""
        if self._asgi is None:
            self._asgi = FeedApp(self)
        return self._asgi

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one ASGI request: the publisher is the application `asgi` itself."""
        await self.asgi(scope, receive, send)

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> Serving:
        """Serve on a port: ``with publisher.serve() as url`` or ``async with publisher.serve() as url``, on asyncio and trio.

        The server runs in a thread of its own and is gone, with all its connections, when the block ends. Needs the extra ``testing``.
        """
        from feedapi_client.testing.server import Serving

        return Serving(self, host, port)

    serving = serve

    def __repr__(self) -> str:
        with self.lock:
            states = ", ".join(
                f"{log.id}{' closed' if log.closed else ''}: {len(log.seqs)} events"
                for log in self._logs.values()
                if log.listed
            )
        return f"<Publisher {self.dialect} {self.url or 'not served'} [{states}]>"
