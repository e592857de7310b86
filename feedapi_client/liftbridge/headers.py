"""The headers of the messages that a relay or the Spark sink publishes."""

from __future__ import annotations

from typing import NamedTuple

from feedapi_client.liftbridge.messages_pb2 import Message

PARTITION = "feedapi-partition"
"""The partition of the feed. On every message of a relay."""
CURSOR = "feedapi-cursor"
"""The cursor that resumes after the message's batch. On every message of a relay."""
FORMAT = "feedapi-format"
"""A `MessageFormat`. On messages that are written exactly once, like the five headers below."""
ATTEMPT = "feedapi-attempt"
"""The id of the attempt to write a batch that the message belongs to."""
INDEX = "feedapi-index"
"""The position of the message in its attempt, from 0."""
COUNT = "feedapi-count"
"""The number of messages of the attempt."""
SNAPSHOT = "feedapi-snapshot"
"""The offset from which a relay has to read to know all positions."""
POSITIONS = "feedapi-positions"
"""JSON: the feed's key, and positions by partition. They are valid when the attempt is complete."""
QUERY = "feedapi-query"
"""The id of the Spark query that wrote the message."""
BATCH = "feedapi-batch"
"""The number of the query's micro-batch."""
ROW = "feedapi-row"
"""The number of the row within the micro-batch."""

_MOST = 2**63 - 1
"""The largest offset. int() refuses more than 4,300 digits, with an error of its own."""


def number_header(message: Message, name: str) -> int | None:
    """Return a header as a number; None when it is missing, or holds none that an offset can be."""
    text = text_header(message, name)
    is_number = len(text) <= len(str(_MOST)) and text.isascii() and text.isdecimal()
    return int(text) if is_number and int(text) <= _MOST else None


def text_header(message: Message, name: str) -> str:
    return message.headers[name].decode(errors="replace") if name in message.headers else ""


class RowId(NamedTuple):
    """The row of a Spark query that a message holds. A row that is written again has the same."""

    query: str
    batch: int
    row: int


def row_id(message: Message) -> RowId | None:
    """Return the row that the Spark sink wrote as this message; None for any other message."""
    query = text_header(message, QUERY)
    batch, row = number_header(message, BATCH), number_header(message, ROW)
    if not query or batch is None or row is None:
        return None
    return RowId(query, batch, row)
