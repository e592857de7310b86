"""``feedapi quarantine``: events that the application failed to handle."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from feedapi_client.cli.command import FAILURE, argument, command, command_group, confirmed, option
from feedapi_client.cli.options import Chosen, Store, opened
from feedapi_client.cli.terminal import Cell, escape_json, print_json, print_table, report, shown

if TYPE_CHECKING:
    from feedapi_client.quarantine import QuarantinedEvent, QuarantineStore

quarantine = command_group(
    "Show quarantined events, which the application failed to handle (a dead-letter queue), "
    "and replay or drop them."
)


@dataclass(frozen=True, kw_only=True)
class QuarantinePlace(Store):
    """A quarantine, which has to exist."""

    def events(self) -> AbstractAsyncContextManager[QuarantineStore]:
        """Open it for a block."""
        from feedapi_client.operations.opening import open_quarantine

        return opened(open_quarantine(self.store, create=False))


@dataclass(frozen=True, kw_only=True)
class QuarantineLs:
    """Options of ``feedapi quarantine ls``."""

    place: QuarantinePlace
    chosen: Chosen
    partition: int | None = option(
        "ID", "Only of this partition.", flags="--partition -p", min=0, max=32767
    )
    json: bool = option(help="Print JSON.", default=False)

    async def load(self, store: QuarantineStore) -> list[QuarantinedEvent]:
        """Return the chosen events, in the order in which they were quarantined."""
        from feedapi_client.quarantine import list_events

        events = list_events(store, partition=self.partition)
        return [event async for event in events if self.chosen.matches(event.feed)]


@command("quarantine ls --store cursors.db", group=quarantine)
async def ls(o: QuarantineLs) -> None:
    """List events: where they come from, and what went wrong.

    Payloads and error texts are not listed: see 'show'.
    """
    async with o.place.events() as store:
        events = await o.load(store)
    if o.json:
        print_json([_summary(event) for event in events])
    elif not events:
        print("the quarantine is empty")
    else:
        columns = ("id", "since", "consumer", "partition", "error", "bytes")
        print_table(columns, [_row(event) for event in events])


def _row(event: QuarantinedEvent) -> list[Cell]:
    return [
        event.id,
        event.time.isoformat(sep=" ", timespec="seconds"),
        str(event.feed),
        str(event.partition),
        event.error_type,
        str(len(event.raw)),
    ]


def _summary(event: QuarantinedEvent) -> dict[str, Any]:
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


@dataclass(frozen=True, kw_only=True)
class QuarantineShow:
    """Options of ``feedapi quarantine show``."""

    id: str = argument("ID")
    place: QuarantinePlace
    raw: bool = option(help="Print the payload alone, byte for byte.", default=False)


@command("quarantine show 17 --store cursors.db", group=quarantine)
async def show(o: QuarantineShow) -> None:
    """Print one event as JSON: where it comes from, the error, headers and payload."""
    from feedapi_client import quarantine

    async with o.place.events() as store:
        event = await quarantine.show(store, o.id)
    if not o.raw:
        data = {"headers": event.headers, "data": orjson.Fragment(event.raw)}
        print_json(_summary(event) | {"error": shown(event.error)} | data)
    elif sys.stdout.isatty():
        print(escape_json(event.raw.decode("utf-8", "backslashreplace")))
    else:
        sys.stdout.buffer.write(event.raw + b"\n")
        sys.stdout.buffer.flush()


@dataclass(frozen=True, kw_only=True)
class Some:
    """Events by their ids, or all that are chosen."""

    ids: list[str] | None = argument(
        "ID",
        "Events as 'ls' lists them; with --all the feed: its URL or a part.",
        default=None,
    )
    place: QuarantinePlace
    every: bool = option(
        help="All events, or those that FEED, --name and --partition choose.",
        default=False,
        flags="--all",
    )
    name: str | None = option("NAME", "The consumer.", envvar="FEEDAPI_NAME")
    partition: int | None = option(
        "ID", "Only of this partition.", flags="--partition -p", min=0, max=32767
    )

    def __post_init__(self) -> None:
        if not self.ids and not self.every:
            raise ValueError("give IDs, or --all")
        if self.every and len(self.ids or ()) > 1:
            raise ValueError("give IDs, or --all with at most one feed")

    async def load(self, store: QuarantineStore) -> list[str]:
        """Return the ids that are given, or those of all chosen events."""
        ids = [] if self.every else self.ids or []
        if ids and self.name is None and self.partition is None:
            return ids
        feed = None
        if self.every:
            feed = self.ids[0] if self.ids else os.environ.get("FEEDAPI_URL")
        chosen = Chosen(feed=feed, name=self.name)
        ls = QuarantineLs(place=self.place, chosen=chosen, partition=self.partition)
        found = [event.id for event in await ls.load(store)]
        return [id for id in found if not ids or id in ids]


@dataclass(frozen=True, kw_only=True)
class QuarantineDrop:
    """Options of ``feedapi quarantine drop``."""

    some: Some
    yes: bool = option(help="Don't ask for confirmation.", default=False, flags="--yes -y")


@command("quarantine drop 17 --store cursors.db", group=quarantine)
async def drop(o: QuarantineDrop) -> None:
    """Delete events for good."""
    from feedapi_client import quarantine

    async with o.some.place.events() as store:
        ids = await o.some.load(store)
        confirmed(f"Delete {len(ids)} events for good?", yes=o.yes)
        report(f"{await quarantine.drop(store, ids)} events deleted")


@dataclass(frozen=True, kw_only=True)
class QuarantineReplay:
    """Options of ``feedapi quarantine replay``."""

    some: Some
    handler: str = option(
        "MODULE:FUNCTION",
        "The application's handler in every form that 'feedapi run' takes, searched in this "
        "directory too.",
        default=...,
    )


@command(
    "quarantine replay --all --store cursors.db --handler myapp.events:handle", group=quarantine
)
async def replay(o: QuarantineReplay) -> int:
    """Call the application's handler with events once more.

    They are replayed in the order in which they were quarantined. Those that fail again stay, and
    the exit code is 1 then.
    """
    from feedapi_client import quarantine
    from feedapi_client.cli.handler_import import import_handler, open_handler

    function = import_handler(o.handler)
    async with o.some.place.events() as store, open_handler(o.handler, function) as handler:
        ids = await o.some.load(store)
        result = await quarantine.replay(store, handler, ids, report=_print_result)
    report(f"{result.handled} events handled, {result.failed} failed again and stay")
    return FAILURE if result.failed else 0


def _print_result(event: QuarantinedEvent, error: Exception | None) -> None:
    from feedapi_client.quarantine.failure_text import failure_line

    result = "handled" if error is None else f"failed again: {failure_line(error)}"
    report(f"{shown(event.id)}  {shown(result)}", escaped=True)
