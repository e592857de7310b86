"""What publishers in the field do differently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EmptyAnswer = Literal["cursor", "echo", "silent", "204"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
    """Deviations of real publishers. Assign a new one to `Publisher.quirks` at any time."""

    integer_ids: bool = False
    """Discovery holds partition ids as JSON integers."""
    integer_lineage: bool = False
    """Discovery holds lineage as JSON integers."""
    old_lineage_names: bool = False
    """`startsAfterParent` and `splitFromAncestors`, as in the specification's first example."""
    omit_parent_zero: bool = False
    """`startsAfterPartition` is left out when the parent is partition 0: Go's zero value."""
    omit_starts_after: bool = False
    """`startsAfterPartition` is left out everywhere."""
    last_cursor: Literal["closed", "always", "never"] | None = None
    """Which partitions have `lastCursor`.

    None: the closed ones in dialect v2-draft, none in v2-token.
    """
    awkward_cursors: bool = False
    """Cursors hold characters that need percent-encoding."""
    ignore_event_types: bool = False
    """`event-types` and `skip-event-types` are ignored, which a publisher may do."""
    answers_v1: bool = False
    """A v2 publisher still answers fetches in dialect v1."""
    keep_token: bool = False
    """A change of topology leaves the token as it is; only `rotate_token()` changes it."""
    unknown_partition: int = 404
    """Status for a partition that is not listed."""
    empty_page: EmptyAnswer = "cursor"
    """What answers a request behind which there is nothing.

    ``cursor``: a line with a cursor. ``echo``: a line with the cursor of the request, ``_first``
    and ``_last`` included. ``silent``: no line. ``204``: status 204. A publisher that lists a
    `lastCursor` still answers with it where another cursor was sent.
    """
    swapped_payload_key: bool = False
    """Events are under ``event`` in dialect v2-token, and under ``data`` in v2-draft."""
    pascal_case: bool = False
    """Lines hold ``Data``, ``Event`` and ``Cursor``, as Go's decoder accepts them."""
    stream_buffer: int = 0
    """A proxy in front holds a streamed response back until it has so many bytes, or ends.

    nginx does so with 8192 bytes, unless ``proxy_buffering`` is off.
    """
