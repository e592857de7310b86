"""What ``feedapi quarantine`` does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import typer

from feedapi_client import quarantine
from feedapi_client.cli.common.errors import CommandError
from feedapi_client.cli.common.escape import one_line
from feedapi_client.cli.common.stores import check_file, database, resolved, shown
from feedapi_client.cli.common.tables import print_table
from feedapi_client.cli.cursors.selection import Target
from feedapi_client.model import Batch
from feedapi_client.quarantine import (
    QuarantinedEvent,
    QuarantineStore,
    Replayed,
    SQLiteQuarantineStore,
)

TABLE = "feedapi_quarantine"
_WHAT = "quarantined events"


@dataclass(frozen=True, slots=True)
class Choice:
    """A store, and which of its events are meant."""

    store: str
    feed: str | None = None
    name: str | None = None
    partition: int | None = None

    def matches(self, event: QuarantinedEvent) -> bool:
        """Whether the event is meant."""
        return self.partition in (None, event.partition) and Target(
            self.store, "", self.feed, self.name
        ).matches(event.feed)


@asynccontextmanager
async def _opened(spec: str) -> AsyncIterator[QuarantineStore]:
    spec = resolved(spec)
    if spec.startswith(("redis://", "rediss://", "unix://")):
        raise CommandError(f"{shown(spec)}: Redis holds no quarantine")
    if "://" in spec:
        async with database(spec, TABLE, _WHAT) as (engine, schema, name, _):
            from feedapi_client.quarantine.sql import SQLAlchemyQuarantineStore

            yield SQLAlchemyQuarantineStore(engine, table=name, schema=schema)
    else:
        check_file(Path(spec), TABLE, _WHAT)
        yield SQLiteQuarantineStore(spec)


async def chosen(choice: Choice) -> list[QuarantinedEvent]:
    """The events that are meant."""
    async with _opened(choice.store) as store:
        return [
            event
            async for event in quarantine.list_events(store, partition=choice.partition)
            if choice.matches(event)
        ]


async def one(spec: str, id: str) -> QuarantinedEvent:
    """One event."""
    async with _opened(spec) as store:
        return await quarantine.show(store, id)


async def drop(spec: str, ids: list[str]) -> int:
    """Delete events; returns how many there were."""
    async with _opened(spec) as store:
        return await quarantine.drop(store, ids)


async def replay(
    choice: Choice, handle: Callable[[Batch], Awaitable[object]], ids: list[str] | None
) -> Replayed:
    """Hand events over once more."""

    def report(event: QuarantinedEvent, error: Exception | None) -> None:
        # The error's text may quote the payload.
        print(
            f"{event.id}  {'handled' if error is None else f'failed again: {type(error).__qualname__}'}",
            flush=True,
        )

    async with _opened(choice.store) as store:
        wanted = ids or [
            event.id
            async for event in quarantine.list_events(store, partition=choice.partition)
            if choice.matches(event)
        ]
        return await quarantine.replay(store, handle, wanted, report=report)


def imported(path: str) -> Callable[[Batch], Awaitable[object]]:
    """The function MODULE:FUNCTION. Raises `CommandError`."""
    module, colon, name = path.partition(":")
    if not colon:
        raise typer.BadParameter("--handler takes MODULE:FUNCTION")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CommandError(f"--handler {path} can't be imported: {error}") from None
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise CommandError(f"--handler {path} is no function")
    return function  # type: ignore[no-any-return]


def print_events(events: list[QuarantinedEvent], *, json: bool) -> None:
    """What ``feedapi quarantine ls`` prints."""
    if json:
        print(
            orjson.dumps([_as_json(event) for event in events], option=orjson.OPT_INDENT_2).decode()
        )
        return
    if not events:
        print("the quarantine is empty")
        return
    rows = [
        (
            e.id,
            e.time.isoformat(sep=" ", timespec="seconds"),
            str(e.feed),
            str(e.partition),
            e.error_type,
            str(len(e.raw)),
        )
        for e in events
    ]
    print_table(("id", "since", "consumer", "partition", "error", "bytes"), rows)


def print_event(event: QuarantinedEvent, *, raw: bool) -> None:
    """What ``feedapi quarantine show`` prints."""
    if raw:
        sys.stdout.buffer.write(event.raw + b"\n")
        sys.stdout.buffer.flush()
        return
    whole = {
        **_as_json(event),
        "error": one_line(event.error),
        "headers": event.headers,
        "data": orjson.Fragment(event.raw),
    }
    print(orjson.dumps(whole, option=orjson.OPT_INDENT_2).decode())


def _as_json(event: QuarantinedEvent) -> dict[str, Any]:
    feed = {"url": event.feed.url, "name": event.feed.name, "filters": dict(event.feed.filters)}
    place = {"partition": event.partition, "cursor": event.cursor, "index": event.index}
    return {"id": event.id, "time": event.time, **feed, **place, "error_type": event.error_type}
