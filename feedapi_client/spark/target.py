"""What to read of a partition, and how far a read of it came. Imports no Spark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A partition to read, and the cursor to start from.

    `sequence` and `depth` are for the columns of the same names. `end` is the cursor of a fixed end
    (see `feedapi_client.spark.fixed_end`); None reads until the partition is caught up. With
    `resumable` the end may also be recognized by the events behind it: where the publisher repeats
    a part of its events, that is too early, and only another read brings the rest. With `required`
    it is an error where no checkpoint has that cursor.
    """

    partition: int
    cursor: str
    closed: bool = False
    last_cursor: str | None = None
    sequence: int = 0
    depth: int = 0
    end: str | None = None
    resumable: bool = False
    required: bool = False


@dataclass(slots=True)
class FetchResult:
    """How far a read of one partition came."""

    partition: int
    start: str
    """The cursor that the read started from."""
    cursor: str
    """The cursor behind the last event that was read."""
    events: int = 0
    ended: bool = False
    """The end was reached: a complete response without events whose cursor is the one asked with,
    or the last cursor of a closed partition."""
    asked_closed: bool = False
    """The discovery before the last request listed the partition as closed."""
    unproven: bool = False
    """It is closed, discovery lists no end, and only this empty response shows one (R6)."""
    silent: bool = False
    """That response held no cursor."""
    reached: bool = False
    """The fixed end of the read was reached."""
    more: bool = False
    """Events are known to follow."""
    refused: int | None = None
    """Status of a refusal that calls for a discovery; 0: the partition is no longer listed."""
    refusal: str = ""
    """What the publisher said with it."""
    conflict: bool = False
    """A token was refused (409): the partitions have changed."""
    unknown_commands: bool = False
    """Lines were there that an extension of the protocol may know: the partitions may have
    changed."""
    failed: str | None = None
    """A temporary error, as text."""
    requests: int = 0
    retries: int = 0
    """Requests that failed or were refused, and were or will be made again."""
