"""What to tell a person about a failed query."""

from __future__ import annotations

import re

from pyspark.errors import StreamingQueryException


class MicroBatchError(StreamingQueryException):
    """The query failed. The message is the cause in one line; ``__cause__`` is Spark's error."""


_OURS = re.compile(r"^(?:\w+\.)*feedapi_client\.[\w.]+(?:Error|Exception): (.+)$", re.MULTILINE)
# The first line of a traceback that is not indented. Some messages begin with a line end, and
# behind blank ones Spark puts a code.
_RAISED = re.compile(
    r"^(?:[\w<>]+\.)*(\w+)(?::\s*(?:SQLSTATE: \w{5}\s*)+$|(:[ \t]*(?:\n\s*)?\S.*))?$", re.MULTILINE
)
# Of py4j's errors, which PySpark does not translate where Delta raises them. Delta breaks lines.
_JAVA_CAUSE = re.compile(
    r"^(?:Caused by)?: (?:[\w$]+\.)*([\w$]+: (?:\[\w+\]\s+)?.+(?:\n(?!Caused by)\S.*)*)",
    re.MULTILINE,
)


def plain_message(error: Exception) -> str:
    """Return the message of an error in one line.

    Spark wraps the error of a micro-batch in tracebacks of several languages. The result is the
    text of this library's error if there is one, else the type and the first line of the error that
    the last Python traceback ends with, or of a Java cause, else the first line.
    """
    text, kind = str(error), type(error).__name__
    if ours := _OURS.findall(text):
        return str(ours[-1]).strip()
    _, traceback, raised = text.rpartition("Traceback (most recent call last):")
    if found := _RAISED.search(raised) if traceback else None:
        kind = found[1]
    if kind == "Py4JJavaError" and (causes := _JAVA_CAUSE.findall(raised)):
        return " ".join(causes[-1].split())
    if found:
        return f"{kind}{' '.join((found[2] or '').split())}"
    return next((line for line in map(str.strip, text.splitlines()) if line), kind)
