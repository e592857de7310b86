"""What to tell a person about a failed query."""

from __future__ import annotations

import re

from pyspark.errors import StreamingQueryException


class MicroBatchError(StreamingQueryException):
    """The query failed. The message is the cause in one line; ``__cause__`` is Spark's error."""


_OURS = re.compile(r"^(?:\w+\.)*feedapi_client\.[\w.]+(?:Error|Exception): (.+)$", re.MULTILINE)
_RAISED = re.compile(
    r"^(?:[\w<>]+\.)*(\w+)(?::\s*(?:SQLSTATE: \w{5}\s*)+$|(:[ \t]*(?:\n\s*)?\S.*))?$", re.MULTILINE
)
"""The first line of a traceback that is not indented; some messages begin with a line end, and
behind blank ones Spark puts a code."""
_JAVA_CAUSE = re.compile(
    r"^(?:Caused by)?: (?:[\w$]+\.)*([\w$]+: (?:\[\w+\]\s+)?.+(?:\n(?!Caused by)\S.*)*)",
    re.MULTILINE,
)
"""In the text of py4j's errors, which PySpark does not translate where Delta raises them. Delta
breaks the lines of its messages."""
_TRACEBACK = "Traceback (most recent call last):"
_UNMAPPABLE = "unmappable characters"
"""Java names files in the encoding of the locale, which LANG=C makes ASCII."""
_LOCALE = ". Set LC_ALL=C.UTF-8 where Spark runs: its locale has no name for such a file"


def first_line(error: Exception) -> str:
    """Return the first line of an error's text that says anything; else its type."""
    return next((line for line in map(str.strip, str(error).splitlines()) if line), "") or (
        type(error).__name__
    )


def plain_message(error: Exception) -> str:
    """Return the message of an error in one line.

    Spark wraps the error of a micro-batch in tracebacks of several languages. The result is the
    text of this library's error if there is one, else the type and the first line of the error that
    the last Python traceback ends with, or of a Java cause, else the first line.
    """
    message = _plain(error)
    return message + _LOCALE if _UNMAPPABLE in message and _LOCALE not in message else message


def _plain(error: Exception) -> str:
    text = str(error)
    ours = _OURS.findall(text)
    if ours:
        return str(ours[-1]).strip()
    _, traceback, raised = text.rpartition(_TRACEBACK)
    found = _RAISED.search(raised) if traceback else None
    kind = type(error).__name__ if found is None else found[1]
    causes = _JAVA_CAUSE.findall(raised) if kind == "Py4JJavaError" else []
    if causes:
        return " ".join(causes[-1].split())
    if found is None:
        return first_line(error)
    return f"{found[1]}{' '.join((found[2] or '').split())}"
