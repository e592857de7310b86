"""``feedapi cat``: a feed's events to stdout."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from feedapi_client.cli.common.options import (
    AuthEnv,
    EventTypes,
    Filters,
    GiveUpAfter,
    HeaderEnv,
    SkipEventTypes,
    Url,
    V1Partitions,
)
from feedapi_client.cli.common.run_async import run_async

_SPECIAL = re.compile(r"_?(first|last)")


def cat(
    url: Url,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on at the end of the feed, until Ctrl-C.")
    ] = False,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="first|last|CURSOR",
            help="Where to begin; a cursor needs one --partition. Stored cursors come first.",
        ),
    ] = None,
    partitions: Annotated[
        list[int] | None,
        typer.Option(
            "--partition",
            "-p",
            min=0,
            max=32767,
            metavar="ID",
            help="Only this partition, at once. Repeatable.",
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            "--store",
            metavar="STORE",
            help="Keep cursors in this SQLite file (or database URL, or env:NAME), and go on from there next time.",
        ),
    ] = None,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Whose cursors they are.")
    ] = "default",
    journal: Annotated[
        bool,
        typer.Option(
            "--journal", help="Keep a week of cursor history, for 'feedapi cursors rewind'."
        ),
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Payloads alone, byte for byte.")] = False,
    checkpoints: Annotated[
        bool,
        typer.Option(
            "--checkpoints", help="Print the cursors too, each behind the events that it covers."
        ),
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, metavar="N", help="End after N events.")
    ] = None,
    event_types: EventTypes = None,
    skip_event_types: SkipEventTypes = None,
    filters: Filters = None,
    v1_partitions: V1Partitions = None,
    v1_headers: Annotated[
        list[str] | None,
        typer.Option(
            "--v1-header", metavar="NAME", help="Event headers to ask a v1 feed for; _all for all."
        ),
    ] = None,
    page_size_hint: Annotated[
        int | None, typer.Option("--page-size-hint", min=1, metavar="N", help="Events a response.")
    ] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="Hold responses open, where the feed offers that; with --follow."
        ),
    ] = False,
    unordered: Annotated[
        bool,
        typer.Option(
            "--unordered", help="Read all partitions at once, whichever comes before which."
        ),
    ] = False,
    auth_env: AuthEnv = None,
    header_env: HeaderEnv = None,
    give_up_after: GiveUpAfter = 30.0,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            help="No progress on stderr (there is none either when stderr is no terminal).",
        ),
    ] = False,
) -> None:
    """Print a feed's events, one line of JSON each: {"partition":2,"data":…}.

    Reads to the end of the feed, or on and on with --follow. With --store the cursors are committed, each after the events before it were written and
    flushed: events cut off by --limit, or not written because the reader closed the pipe, come again next time. Ctrl-C ends it after the batch in hand.
    """
    from feedapi_client.cli.cat.consume import Job, read
    from feedapi_client.cli.common.http_client import fetch_options, headers_from

    job = Job(
        url=url,
        start=_start(start, partitions),
        start_given=start is not None,
        partitions=frozenset(partitions or ()),
        follow=follow,
        ordered=not unordered,
        store=store,
        name=name,
        journal=journal,
        raw=raw,
        checkpoints=checkpoints,
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
        headers=headers_from(auth_env, header_env),
        give_up_after=give_up_after,
        quiet=quiet,
    )
    if not name:
        raise typer.BadParameter("--name must not be empty")
    if (journal or name != "default") and store is None:
        raise typer.BadParameter("--name and --journal need --store")
    raise typer.Exit(run_async(read, job))


def _start(start: str | None, partitions: list[int] | None) -> str | dict[int, str]:
    special = _SPECIAL.fullmatch(start or "first")
    if special is not None:
        return special[1]
    if len(partitions or ()) != 1:
        raise typer.BadParameter(
            "--from CURSOR needs one --partition: a cursor is one of a partition"
        )
    assert start is not None
    assert partitions is not None
    if not start.isascii() or not start.isprintable():
        raise typer.BadParameter("--from: a cursor is printable ASCII")
    return {partitions[0]: start}
