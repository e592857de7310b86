"""The oldest quarantined events of a consumer, for the page: where they are and why, no payload."""

from __future__ import annotations

import time
from typing import Any

import anyio

from feedapi_client.consumer import FeedConsumer
from feedapi_client.errors import StoreError
from feedapi_client.quarantine.base import QuarantineStore
from feedapi_client.quarantine.location import quarantine_beside

_SHOWN = 20
_MAX_AGE = 10.0
_TIMEOUT = 5.0


class QuarantineView:
    """Reads the quarantine of one consumer, at most once in 10 seconds.

    Arguments:
        store: None for the one beside the consumer's cursors, if there is one.
    """

    def __init__(self, consumer: FeedConsumer, store: QuarantineStore | None) -> None:
        self._consumer = consumer
        self._store = store
        self._found: dict[str, Any] | None = None
        self._read = -_MAX_AGE

    async def read(self) -> dict[str, Any] | None:
        """Return the first events and whether there are more; None where that can't be said.

        To be called in the event loop of the consumer, whose database this is.
        """
        if time.monotonic() - self._read >= _MAX_AGE:
            self._read = time.monotonic()
            self._found = None
            with anyio.move_on_after(_TIMEOUT):
                self._found = await self._load()
        return self._found

    async def _load(self) -> dict[str, Any] | None:
        try:
            store = self._store or quarantine_beside(self._consumer.store)
            events = await store.page(self._consumer.key, limit=_SHOWN + 1)
        except StoreError:
            return None  # no quarantine beside these cursors, or nothing was put there ever
        return {
            "more": len(events) > _SHOWN,
            "events": [
                {
                    "id": event.id,
                    "partition": event.partition,
                    "error_type": event.error_type,
                    "time": event.time,
                }
                for event in events[:_SHOWN]
            ],
        }
