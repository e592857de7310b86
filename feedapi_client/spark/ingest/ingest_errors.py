"""What to tell a person about a failed query."""

from __future__ import annotations

import re

from pyspark.errors import StreamingQueryException


class MicroBatchError(StreamingQueryException):
    """The query failed. The message is the cause in one line; ``__cause__`` is Spark's error."""


_OURS = re.compile(r"^(?:\w+\.)*feedapi_client\.[\w.]+(?:Error|Exception): (.+)$", re.MULTILINE)
_RAISED = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception))(: .+)?$", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"


def plain_message(error: Exception) -> str:
    """Return the message of an error in one line.

    Spark wraps the error of a micro-batch in tracebacks of several languages. The result is the
    text of this library's error if there is one, else the type and the first line of the error that
    the last Python traceback ends with, else the first line.
    """
    text = str(error)
    ours = _OURS.findall(text)
    if ours:
        return str(ours[-1]).strip()
    _, traceback, raised = text.rpartition(_TRACEBACK)
    found = _RAISED.search(raised) if traceback else None
    return f"{found[1]}{found[2] or ''}".strip() if found else text.strip().split("\n", 1)[0]
