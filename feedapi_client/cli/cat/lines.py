"""Format events as lines for stdout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import orjson

from feedapi_client.model import Batch, Event

# The fields behind the properties `raw` and `headers` of an event: reading them takes 0.2 µs less
# for each event, a fifth of the CPU time of the whole command.
_payload = attrgetter("_payload")
_headers = attrgetter("_headers")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineFormat:
    """Formats batches as NDJSON, one line for each event.

    A line is ``{"partition":2,"data":…}``, with ``headers`` where the event has some; with `raw` it
    is the payload alone. Payloads are byte for byte as the publisher sent them. With `checkpoints`
    a line ``{"partition":2,"cursor":"…"}`` follows the last event of each batch.
    """

    raw: bool
    checkpoints: bool

    def format(self, batch: Batch, events: Sequence[Event]) -> bytes:
        """Return the lines of `events`, which are the first ones of the batch, or all of them.

        The line of the checkpoint is there only after all of them.
        """
        lines = self._event_lines(batch.partition, events) if events else b""
        if self.checkpoints and len(events) == len(batch.events):
            lines += orjson.dumps({"partition": batch.partition, "cursor": batch.cursor}) + b"\n"
        return lines

    def _event_lines(self, partition: int, events: Sequence[Event]) -> bytes:
        if self.raw:
            return b"\n".join(map(_payload, events)) + b"\n"
        if any(map(_headers, events)):
            return b"".join([_with_headers(event) for event in events])
        start = b'{"partition":%d,"data":' % partition
        return start + (b"}\n" + start).join(map(_payload, events)) + b"}\n"


def _with_headers(event: Event) -> bytes:
    headers = b'"headers":' + orjson.dumps(event.headers) + b"," if event.headers else b""
    return b'{"partition":%d,%s"data":%s}\n' % (event.partition, headers, event.raw)
