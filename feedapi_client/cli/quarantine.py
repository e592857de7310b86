"""``feedapi quarantine``: events that the application failed to handle."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from feedapi_client.cli import options
from feedapi_client.cli.command import FAILURE, argument, command, command_group, flag
from feedapi_client.cli.options import Chosen, Store, some_partitions
from feedapi_client.cli.run import Application
from feedapi_client.cli.terminal import print_json, print_table, report, shown
from feedapi_client.protocol.text import counted

if TYPE_CHECKING:
    from feedapi_client.model import Batch
    from feedapi_client.quarantine import QuarantinedEvent, QuarantineStore

quarantine = command_group(
    "Show quarantined events, which the application failed to handle (a dead-letter queue), "
    "and replay or drop them."
)
_command = partial(command, group=quarantine)


async def _chosen(
    store: QuarantineStore, chosen: Chosen, partitions: list[int] | None
) -> list[QuarantinedEvent]:
    from feedapi_client.quarantine import list_events

    return [
        event
        async for event in list_events(store)
        if chosen.matches(event.feed) and (partitions is None or event.partition in partitions)
    ]


@_command("quarantine ls --store cursors.db")
async def ls(
    *,
    chosen: Chosen,
    partitions: list[int] | None = some_partitions(),
    json: bool = options.as_json(),
    place: Store,
) -> None:
    """List events: where they come from, and what went wrong.

    Payloads and error texts are not listed: see 'show'.
    """
    async with place.quarantine() as store:
        events = await _chosen(store, chosen, partitions)
    if json:
        print_json([_summary(event) for event in events])
        return
    if not events:
        print("the quarantine is empty")
        return
    rows = []
    for each in events:
        since = each.time.isoformat(sep=" ", timespec="seconds")
        where = (str(each.feed), str(each.partition))
        rows.append((each.id, since, *where, each.error_type, str(len(each.raw))))
    print_table(("id", "since", "consumer", "partition", "error", "bytes"), rows)


def _summary(event: QuarantinedEvent) -> dict[str, Any]:
    """Return what is known of an event, but neither payload nor error text, which may quote it."""
    feed = {"url": event.feed.url, "name": event.feed.name, "filters": dict(event.feed.filters)}
    names = ("partition", "cursor", "index", "error_type")
    known = {name: getattr(event, name) for name in names}
    return {"id": event.id, "time": event.time, **feed, **known}


@_command("quarantine show 17 --store cursors.db")
async def show(*, id: str = argument("ID", "As 'ls' lists it."), place: Store) -> None:
    """Print one event as JSON: where it comes from, the error, headers and payload."""
    from feedapi_client import quarantine

    async with place.quarantine() as store:
        event = await quarantine.show(store, id)
    data = {"headers": event.headers, "data": orjson.Fragment(event.raw)}
    print_json(_summary(event) | {"error": shown(event.error)} | data)


@dataclass(frozen=True, kw_only=True)
class _Some:
    ids: list[str] | None = argument(
        "ID",
        "Events as 'ls' lists them; with --all the feed: its URL or a part, or FEEDAPI_URL.",
        default=None,
    )
    place: Store
    every: bool = flag("All events, or those that FEED, --name and --partition choose.", "--all")
    name: str | None = options.of_consumer()
    partitions: list[int] | None = some_partitions()

    def __post_init__(self) -> None:
        if not self.ids and not self.every:
            raise ValueError("give IDs, or --all")
        if self.every and len(self.ids or ()) > 1:
            raise ValueError("give IDs, or --all with at most one feed")

    async def load(self, store: QuarantineStore) -> list[str]:
        ids, feed = self.ids or [], None
        if self.every:
            ids, feed = [], ids[0] if ids else os.environ.get("FEEDAPI_URL")
        elif self.name is None and self.partitions is None:
            return ids
        found = await _chosen(store, Chosen(feed=feed, name=self.name), self.partitions)
        return [event.id for event in found if not ids or event.id in ids]


@_command("quarantine drop 17 --store cursors.db")
async def drop(
    *, some: _Some, json: bool = options.as_json(), yes: bool = options.without_questions()
) -> None:
    """Delete events for good."""
    from feedapi_client import quarantine

    async with some.place.quarantine() as store:
        ids = await some.load(store)
        question = f"Delete {counted(len(ids), 'event')} for good?"
        options.confirm(question, yes=yes, beside_json=json)
        deleted = await quarantine.drop(store, ids)
    if json:
        print_json({"deleted": deleted})
    else:
        report(f"{counted(deleted, 'event')} deleted")


@_command("quarantine replay --all --store cursors.db --handler myapp.events:handle")
async def replay(*, application: Application, some: _Some, json: bool = options.as_json()) -> int:
    """Call the application's handler with events once more: as 'feedapi run' takes it, with --key.

    They are replayed in the order in which they were quarantined. Those that fail again stay, and
    the exit code is 1 then.
    """
    from feedapi_client import quarantine
    from feedapi_client.quarantine.failure_text import failure_line

    events: list[dict[str, str | None]] = []

    def replayed(event: QuarantinedEvent, error: Exception | None) -> None:
        failure = None if error is None else failure_line(error)
        events.append({"id": event.id, "error": failure})
        if not json:
            result = "handled" if failure is None else f"failed again: {failure}"
            report(f"{shown(event.id)}  {shown(result)}", escaped=True)

    function = application.load()
    async with some.place.quarantine() as store, application.opened(function) as handler:

        async def handle(batch: Batch) -> None:
            await handler(batch if application.key is None else batch.events[0])

        ids = await some.load(store)
        result = await quarantine.replay(store, handle, ids, report=replayed)
    if json:
        print_json({"handled": result.handled, "failed": result.failed, "events": events})
    else:
        report(f"{counted(result.handled, 'event')} handled, {result.failed} failed again and kept")
    return FAILURE if result.failed else 0
