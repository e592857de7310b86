"""The command ``feedapi cat``."""

from __future__ import annotations

import re

import typer

from feedapi_client.cli.cat.options import (
    Checkpoints,
    Follow,
    KeepJournal,
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
from feedapi_client.cli.common.options import (
    AuthEnv,
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
    give_up_after: GiveUpAfter = 30.0,
    quiet: Quiet = False,
) -> None:
    """Print a feed's events, one line of JSON each: {"partition":2,"data":…}.

    Ends at the end of the feed, or goes on with --follow until Ctrl-C. With --store the cursors
    are committed, each after the events before it were written and flushed. Events cut off by
    --limit, or not written because the reader closed the pipe, come again next time. Ctrl-C ends
    it after the batch in flight.
    """
    from feedapi_client.cli.cat.consume import CatSettings, print_events
    from feedapi_client.cli.cat.lines import LineFormat
    from feedapi_client.cli.common.feed_url import checked_url
    from feedapi_client.cli.common.fetch_options import fetch_options
    from feedapi_client.cli.common.http_client import headers_from_environment

    settings = CatSettings(
        url=checked_url(url),
        start=_start(start, partitions),
        start_given=start is not None,
        partitions=frozenset(partitions or ()),
        follow=follow,
        ordered=not unordered,
        lineage=edges(lineage),
        store=store,
        name=name,
        journal=journal,
        lines=LineFormat(raw=raw, checkpoints=checkpoints),
        limit=limit,
        fetch=fetch_options(
            filters,
            event_types,
            skip_event_types,
            page_size_hint=page_size_hint,
            stream=stream,
            v1_headers=v1_headers,
        ),
        v1_partitions=v1_partitions,
        headers=headers_from_environment(auth_env, header_env),
        give_up_after=give_up_after,
        quiet=quiet,
    )
    if not name:
        raise typer.BadParameter("--name must not be empty")
    if (journal or name != "default") and store is None:
        raise typer.BadParameter("--name and --journal need --store")
    raise typer.Exit(run_async(print_events, settings))


def _start(start: str | None, partitions: list[int] | None) -> str | dict[int, str]:
    """Return the `start` of the consumer for ``--from``. Raises `typer.BadParameter`."""
    start = start or "first"
    if (special := _FIRST_OR_LAST.fullmatch(start)) is not None:
        return special[1]
    if partitions is None or len(partitions) != 1:
        raise typer.BadParameter(
            "--from CURSOR needs one --partition: a cursor belongs to one partition"
        )
    if not start.isascii() or not start.isprintable():
        raise typer.BadParameter("--from: a cursor is printable ASCII")
    return {partitions[0]: start}
