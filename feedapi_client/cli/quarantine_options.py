"""The options of ``feedapi quarantine``, and events as JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from feedapi_client.cli.escape import shown
from feedapi_client.cli.store_options import Chosen, Store

if TYPE_CHECKING:
    from feedapi_client.quarantine import QuarantinedEvent, QuarantineStore

Ids = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Events as 'ls' lists them.")
]
All = Annotated[
    bool,
    typer.Option("--all", help="All events, or those that --feed, --name and --partition choose."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenEvents:
    """A quarantine, and which of its events are meant."""

    store: Store
    chosen: Chosen
    partition: Annotated[
        int | None,
        typer.Option(
            "--partition", "-p", min=0, max=32767, metavar="ID", help="Only of this partition."
        ),
    ] = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[QuarantineStore]:
        """Open the quarantine, which has to exist. See `open_quarantine_of`."""
        from feedapi_client.cli.databases import open_quarantine_of

        async with open_quarantine_of(self.store) as store:
            yield store

    async def load(self, store: QuarantineStore) -> list[QuarantinedEvent]:
        """Return the chosen events, in the order in which they were quarantined."""
        from feedapi_client import quarantine

        events = quarantine.list_events(store, partition=self.partition)
        return [event async for event in events if self.chosen.matches(event.feed)]

    async def ids(self, store: QuarantineStore, given: list[str] | None) -> list[str]:
        """Return the ids that are given, or those of all chosen events."""
        return given or [event.id for event in await self.load(store)]

    def check(self, ids: list[str] | None, *, every: bool) -> None:
        """Raise `typer.BadParameter` unless either ids or ``--all`` are given."""
        if bool(ids) == every:
            raise typer.BadParameter("give IDs, or --all")
        given = (self.chosen.feed, self.chosen.name, self.partition)
        if ids and any(each is not None for each in given):
            raise typer.BadParameter("--feed, --name and --partition go with --all")


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
