"""An in-memory FeedAPI publisher: what consumers are tested and demonstrated against.

::

    from feedapi_client.testing import Publisher

    publisher = Publisher(partitions=2, dialect="v2-token", page_size=100, checkpoint_every=10)
    publisher.append(0, {"entity": "a", "n": 1})  # returns the cursor after it
    with publisher.serve() as url:  # or: async with, on asyncio and trio
        ...  # http://127.0.0.1:PORT/feed
        publisher.split(0, into=(2, 3), method="starts-after")
        publisher.publish("a", {"entity": "a", "n": 2})  # where events of entity a go now
        publisher.fail(503, times=2)  # see feedapi_client.testing.faults

API::

    Publisher(partitions: int | Iterable[int] = 1, *, dialect="v2-token", page_size=1000,
              checkpoint_every=100, vary=False, seed=None, stream=False, exactly_once=True,
              filters: Iterable[str] | Mapping[str, (payload, value) -> bool] = (),
              key=None, quirks=Quirks(), bearer=None)

    Events. A payload is a dict, str, or bytes (JSON, sent verbatim).
      append(partition, payload, *, headers=None, entity=None) -> str
                                    append an event; the cursor after it
      extend(partition, payloads) -> str
                                    append many at once, fast
      append_internal(partition, count=1) -> str
                                    events that are never shown: they only move the cursor
      publish(entity, payload, *, headers=None) -> tuple[int, str]
                                    append to where events of the entity go now; (partition, cursor)
      route(entity, payload=None) -> int
                                    that partition
      payloads(partition=None) -> list
                                    what was published, decoded: of a partition, or of the feed
      end_cursor(partition) -> str  the cursor after the last event, as of `_last`, lastCursor
    Topology. Each change changes the token, unless Quirks.keep_token.
      close(partition); reopen(partition)
      split(partition, into=2 | ids, *, method="starts-after" | "cursor-from", key=None)
          -> tuple[int, ...]
      roll_back(partition)          undo a split by cursor transfer: the old id is open again
      roll_forward(partition) -> tuple[int, ...]
      merge(partitions, into=None) -> int
      add(partition=None, *, starts_after=None, cursor_from=(), closed=False) -> int
                                    any topology, also an illegal one
      remove(partition)             no longer listed; add(partition) lists it again
      rotate_token() -> str
      upgrade(dialect)              same as assigning `dialect`; cursors carry over
      partitions -> dict[int, Partition]; open_partitions() -> list[int]
      discovery() -> dict; token -> str
    Settings that may be assigned at any time
      dialect, page_size, checkpoint_every, scan_limit, vary, stream, exactly_once, filters, key,
      quirks
      bearer                        requests without that bearer token: 401, with another: 403
      require_query                 {name: value} that requests need, else 403
      rate_limit                    RateLimit(per_second, burst=1, status=429, retry_after=None)
      type_field                    the payload field of event types, "type"
    Faults
      fail(fault, *, on="fetch" | "discovery" | "any", partition=None, times=1 | None, after=0,
           seconds=None, share=1.0) -> FaultRule
      heal(); faults -> list[FaultRule]
    Traffic
      requests -> list[Request]     kind, partition, cursor, token, query, headers, path, time,
                                    status
      counters                      "discovery", "fetch", "fetch 409", "refused" ...
      in_flight, max_in_flight      responses in flight
      bytes_sent                    of bodies
      clear_requests()
      await wait(predicate, timeout=10.0)
                                    until predicate() is true; asyncio and trio
    Serving
      serve(host="127.0.0.1", port=0) -> Serving
                                    an async and plain context manager that returns the URL
      serving = serve; url
      asgi                          the ASGI application

Faults, in the module `feedapi_client.testing.faults`, where an int means `Status`:
Status(code, body, headers), Redirect(location, code), Html(), Replace(json or bytes),
Edit(change the discovery), Rewrite(bytes -> bytes), Reset(after_bytes, after_lines),
Truncate(after_bytes, after_lines, chunked), BrokenChunk(), CutLine(after_lines, text),
ErrorText(after_lines), NoFinalNewline(), NoCheckpoint(keep), SameCheckpoint(), EmptyPage(moving),
EndlessLine(), EndlessRun(), UnknownCommands(commands), ExtraFields(), Delay(seconds),
Hang(after_bytes, after_lines), Trickle(piece, interval), Gzip(), Lag(seconds, ahead),
Maintenance(body), Empty(), DroppedQuery(), NoPartitions(null), Both((fault, fault, ...)), or a
function of your own.

A cursor-from split redistributes the whole history. When the partition itself starts after another
one, discovery can't say both, because the specification allows one mechanism. A consumer that has
not read the older partition yet then loses the order between the two. Avoid this where order is
what you test.
"""

from __future__ import annotations

from feedapi_client.testing.publisher import faults
from feedapi_client.testing.publisher.asgi import Publisher
from feedapi_client.testing.publisher.faults.rules import Fault, FaultRule, FaultTarget
from feedapi_client.testing.publisher.feed import Filter
from feedapi_client.testing.publisher.quirks import Quirks
from feedapi_client.testing.publisher.requests import Request
from feedapi_client.testing.publisher.responses import Response
from feedapi_client.testing.publisher.routing import Payload, default_key
from feedapi_client.testing.publisher.topology import DIALECTS, SplitMethod
from feedapi_client.testing.publisher.traffic import KEPT_REQUESTS, RateLimit

__all__ = [
    "DIALECTS",
    "KEPT_REQUESTS",
    "Fault",
    "FaultRule",
    "FaultTarget",
    "Filter",
    "Payload",
    "Publisher",
    "Quirks",
    "RateLimit",
    "Request",
    "Response",
    "SplitMethod",
    "default_key",
    "faults",
]
