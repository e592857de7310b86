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

What there is, beside the arguments of `Publisher`, each of which is an attribute that may be
assigned at any time::

    Events      append extend append_internal publish route payloads end_cursor another_cursor
                A payload is a dict, str, or bytes (JSON, sent verbatim).
    Topology    close reopen split merge add remove roll_back roll_forward rotate_token upgrade
                partitions open_partitions discovery token
                Each change changes the token, unless Quirks.keep_token.
    Refusals    bearer          requests without that bearer token: 401, with another: 403
                require_query   {name: value} that requests need, else 403
    Faults      fail heal faults
    Traffic     requests clear_requests wait in_flight max_in_flight bytes_sent
                counters        "discovery", "fetch", "fetch 409" ...
    Serving     serve serving url asgi
    Others      type_field      the payload field of event types, "type"
                clock           what tells the present time, `time.monotonic`

A cursor-from split redistributes the whole history. When the partition itself starts after another
one, discovery can't say both, because the specification allows one mechanism. A consumer that has
not read the older partition yet then loses the order between the two. Avoid this where order is
what you test.
"""

from feedapi_client.testing.publisher import faults
from feedapi_client.testing.publisher.answers import answer
from feedapi_client.testing.publisher.feed import Quirks, SplitMethod
from feedapi_client.testing.publisher.messages import Request, Response
from feedapi_client.testing.publisher.publisher import Publisher
from feedapi_client.testing.publisher.rules import Fault, FaultRule, FaultTarget

__all__ = [
    "Fault",
    "FaultRule",
    "FaultTarget",
    "Publisher",
    "Quirks",
    "Request",
    "Response",
    "SplitMethod",
    "answer",
    "faults",
]
