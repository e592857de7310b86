"""The command ``feedapi cat``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import typer

from feedapi_client.cli.cat.options import (
    Checkpoints,
    Follow,
    Format,
    KeepJournal,
    Key,
    Limit,
    Name,
    PageSizeHint,
    Partitions,
    Quiet,
    Raw,
    Start,
    Store,
    Stream,
    Unordered,
    V1Headers,
)
from feedapi_client.cli.common.monitoring import Monitor
from feedapi_client.cli.common.options import (
    AuthEnv,
    CaFile,
    EventTypes,
    Filters,
    GiveUpAfter,
    HeaderEnv,
    Lineage,
    SkipEventTypes,
    Url,
    V1Partitions,
    edges,
)
from feedapi_client.cli.common.run_async import run_async

if TYPE_CHECKING:
    from datetime import datetime

_FIRST_OR_LAST = re.compile(r"_?(first|last)")


def cat(
    url: Url,
    follow: Follow = False,
    start: Start = None,
    partitions: Partitions = None,
    store: Store = None,
    name: Name = "default",
    journal: KeepJournal = False,
    raw: Raw = False,
    checkpoints: Checkpoints = False,
    template: Format = None,
    key: Key = None,
    limit: Limit = None,
    event_types: EventTypes = None,
    skip_event_types: SkipEventTypes = None,
    filters: Filters = None,
    v1_partitions: V1Partitions = None,
    v1_headers: V1Headers = None,
    page_size_hint: PageSizeHint = None,
    stream: Stream = False,
    unordered: Unordered = False,
    lineage: Lineage = None,
    auth_env: AuthEnv = None,
    header_env: HeaderEnv = None,
    ca_file: CaFile = None,
    give_up_after: GiveUpAfter = 30.0,
    monitor: Monitor = None,
    quiet: Quiet = False,
) -> None:
    """Print a feed's events, one line of JSON each: {"partition":2,"data":…}.

    Ends at the end of the feed, or goes on with --follow until Ctrl-C. With --store the cursors
    are committed, each after the events before it were written and flushed. Events that were not
    written because the reader closed the pipe come again next time. Ctrl-C ends it after the batch
    in flight.
    """
    from feedapi_client.cli.cat.consume import CatSettings, print_events
    from feedapi_client.cli.cat.lines import LineFormat
    from feedapi_client.cli.cat.template import TemplateFormat
    from feedapi_client.cli.common.feed_url import checked_url
    from feedapi_client.cli.common.fetch_options import fetch_options
    from feedapi_client.cli.common.http_client import headers_from_environment

    if (raw or checkpoints) and template is not None:
        raise typer.BadParameter("--format can't be combined with --raw or --checkpoints")
    if key is not None and template is None:
        raise typer.BadParameter("--key needs --format, with %k")
    since = _time(start, partitions) if store is not None else None
    settings = CatSettings(
        url=checked_url(url),
        start=_start(None if since else start, partitions),
        start_given=start is not None and since is None,
        since=since,
        partitions=frozenset(partitions or ()),
        follow=follow,
        ordered=not unordered,
        lineage=edges(lineage),
        store=store,
        name=name,
        journal=journal,
        lines=LineFormat(raw=raw, checkpoints=checkpoints)
        if template is None
        else TemplateFormat(template, key),
        limit=limit,
        fetch=fetch_options(
            filters,
            event_types,
            skip_event_types,
            # So that a cursor comes where the limit is.
            page_size_hint=page_size_hint or (limit if store and not stream else None),
            stream=stream,
            v1_headers=v1_headers,
        ),
        v1_partitions=v1_partitions,
        headers=headers_from_environment(auth_env, header_env),
        ca_file=ca_file,
        give_up_after=give_up_after,
        monitor=monitor,
        quiet=quiet,
    )
    if not name:
        raise typer.BadParameter("--name must not be empty")
    if (journal or name != "default") and store is None:
        raise typer.BadParameter("--name and --journal need --store")
    raise typer.Exit(run_async(print_events, settings))


def _time(start: str | None, partitions: list[int] | None) -> datetime | None:
    """Return the time that ``--from`` stands for; None for anything else, such as a cursor."""
    from feedapi_client.cli.common.times import parse_time

    if start is None or _FIRST_OR_LAST.fullmatch(start) is not None:
        return None
    if partitions and start.isalnum():  # 20310504 is a cursor, although ISO 8601 knows it
        return None
    try:
        return parse_time(start)
    except ValueError:
        return None


def _start(start: str | None, partitions: list[int] | None) -> str | dict[int, str]:
    """Return the `start` of the consumer for ``--from``. Raises `typer.BadParameter`."""
    start = start or "first"
    if (special := _FIRST_OR_LAST.fullmatch(start)) is not None:
        return special[1]
    if partitions is None or len(partitions) != 1:
        raise typer.BadParameter(
            "--from CURSOR needs one --partition: a cursor belongs to one partition; --from TIME "
            "needs --store"
        )
    if not start.isascii() or not start.isprintable():
        raise typer.BadParameter("--from: a cursor is printable ASCII")
    return {partitions[0]: start}
