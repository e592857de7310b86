"""Quarantined events as JSON."""

from __future__ import annotations

from typing import Any

import orjson

from feedapi_client.cli.common.escape import shown
from feedapi_client.quarantine import QuarantinedEvent


def summary(event: QuarantinedEvent) -> dict[str, Any]:
    """Return what is known of an event, but neither payload nor error text, which may quote it."""
    return {
        "id": event.id,
        "time": event.time,
        "url": event.feed.url,
        "name": event.feed.name,
        "filters": dict(event.feed.filters),
        "partition": event.partition,
        "cursor": event.cursor,
        "index": event.index,
        "error_type": event.error_type,
    }


def with_payload(event: QuarantinedEvent) -> dict[str, Any]:
    """Return all that is known of an event."""
    return {
        **summary(event),
        "error": shown(event.error),
        "headers": event.headers,
        "data": orjson.Fragment(event.raw),
    }
