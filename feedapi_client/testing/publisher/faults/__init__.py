"""What can go wrong at a publisher. Use it with `Publisher.fail`.

::

    publisher.fail(503, times=2)  # an error status, on fetch
    publisher.fail(Status(429, headers={"retry-after": "1"}), partition=3)
    publisher.fail(Replace({"partitions": [{"id": "70000"}]}), on="discovery", times=None)
    publisher.fail(Truncate(after_lines=7))  # the connection ends in the middle of line eight

Faults that break the connection or the framing (`Reset`, `Truncate`, `BrokenChunk`) need the
publisher on a port (`Publisher.serve`). All others also work through `Publisher.asgi`.

Any function ``(response, request, publisher) -> response`` is a fault too. It may change the
`Response` or return another one.
"""

from __future__ import annotations

from feedapi_client.testing.publisher.faults.connection import (
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
from feedapi_client.testing.publisher.faults.responses import (
    Both,
    Edit,
    Gzip,
    Html,
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
    "Edit",
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
    "NoCheckpoint",
    "NoFinalNewline",
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
