"""What can go wrong at a publisher. Use it with `Publisher.fail`.

::

    publisher.fail(503, times=2)  # an error status, on fetch
    publisher.fail(Status(429, headers={"retry-after": "1"}), partition=3)
    publisher.fail(Replace({"partitions": [{"id": "70000"}]}), on="discovery", times=None)
    publisher.fail(Truncate(after_lines=7))  # the connection ends in the middle of line eight
    publisher.fail(Maintenance(), on="any", seconds=0.6)  # a gateway, for a while
    publisher.fail(Lag(1.5, ahead="tail"), on="any", times=None, share=0.5)  # one of two replicas

Faults that break the connection or the framing (`Reset`, `Truncate`, `BrokenChunk`) need the
publisher on a port (`Publisher.serve`). All others also work through `Publisher.asgi`.

Any function ``(response, request, publisher) -> response`` is a fault too. It may change the
`Response` or return another one.
"""

from __future__ import annotations

from feedapi_client.testing.publisher.faults.connection_faults import (
    BrokenChunk,
    Delay,
    Hang,
    Reset,
    Trickle,
    Truncate,
)
from feedapi_client.testing.publisher.faults.lines import (
    CutLine,
    EmptyPage,
    EndlessLine,
    EndlessRun,
    ErrorText,
    ExtraFields,
    NoCheckpoint,
    NoFinalNewline,
    SameCheckpoint,
    UnknownCommands,
)
from feedapi_client.testing.publisher.faults.response_faults import (
    Both,
    DroppedQuery,
    Edit,
    Empty,
    Gzip,
    Html,
    Lag,
    Maintenance,
    NoPartitions,
    Redirect,
    Replace,
    Rewrite,
    Status,
)
from feedapi_client.testing.publisher.faults.rules import Fault, FaultRule, FaultTarget

__all__ = [
    "Both",
    "BrokenChunk",
    "CutLine",
    "Delay",
    "DroppedQuery",
    "Edit",
    "Empty",
    "EmptyPage",
    "EndlessLine",
    "EndlessRun",
    "ErrorText",
    "ExtraFields",
    "Fault",
    "FaultRule",
    "FaultTarget",
    "Gzip",
    "Hang",
    "Html",
    "Lag",
    "Maintenance",
    "NoCheckpoint",
    "NoFinalNewline",
    "NoPartitions",
    "Redirect",
    "Replace",
    "Reset",
    "Rewrite",
    "SameCheckpoint",
    "Status",
    "Trickle",
    "Truncate",
    "UnknownCommands",
    "as_fault",
]


def as_fault(fault: int | Fault) -> Fault:
    """Return a fault: the given one, or one for an error status."""
    return Status(fault) if isinstance(fault, int) else fault
