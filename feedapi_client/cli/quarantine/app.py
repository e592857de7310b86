"""``feedapi quarantine``: events that an application could not handle."""

from __future__ import annotations

from typing import Annotated

import typer

from feedapi_client.cli.common.errors import CommandGroup
from feedapi_client.cli.common.exit_codes import FAILURE
from feedapi_client.cli.common.options import Feed, Json, Name, Store, Yes
from feedapi_client.cli.common.run_async import run_async

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Look at events that were put aside because the application failed to handle them, and hand them over once more or drop them.",
)

Ids = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Events as 'ls' lists them.")
]
All = Annotated[
    bool,
    typer.Option("--all", help="All events, or those that --feed, --name and --partition choose."),
]
Partition = Annotated[
    int | None, typer.Option("--partition", "-p", metavar="ID", help="Only of this partition.")
]


@app.command("ls")
def ls(
    store: Store,
    feed: Feed = None,
    name: Name = None,
    partition: Partition = None,
    json: Json = False,
) -> None:
    """List events: where they come from, and what went wrong. Payloads and error texts are for 'show'."""
    from feedapi_client.cli.quarantine import selection as ward

    ward.print_events(run_async(ward.chosen, ward.Choice(store, feed, name, partition)), json=json)


@app.command("show")
def show(
    id: Annotated[str, typer.Argument(metavar="ID")],
    store: Store,
    raw: Annotated[bool, typer.Option("--raw", help="The payload alone, byte for byte.")] = False,
) -> None:
    """Print one event as JSON: its place, the error, headers and payload."""
    from feedapi_client.cli.quarantine import selection as ward

    ward.print_event(run_async(ward.one, store, id), raw=raw)


@app.command("drop")
def drop(
    store: Store,
    ids: Ids = None,
    every: All = False,
    feed: Feed = None,
    name: Name = None,
    partition: Partition = None,
    yes: Yes = False,
) -> None:
    """Delete events for good."""
    from feedapi_client.cli.quarantine import selection as ward

    _check(ids, every, feed, name, partition)
    choice = ward.Choice(store, feed, name, partition)
    doomed = ids or [event.id for event in run_async(ward.chosen, choice)]
    if not yes:
        typer.confirm(f"Delete {len(doomed)} events for good?", abort=True)
    print(f"{run_async(ward.drop, store, doomed)} events deleted")


@app.command("replay")
def replay(
    store: Store,
    handler: Annotated[
        str,
        typer.Option(
            "--handler",
            metavar="MODULE:FUNCTION",
            help="The application's 'async def handle(batch)', looked for in this directory too.",
        ),
    ],
    ids: Ids = None,
    every: All = False,
    feed: Feed = None,
    name: Name = None,
    partition: Partition = None,
) -> None:
    """Hand events to the application's handler once more, in the order in which they were put aside. Those that fail again stay; exit code 1 then."""
    from feedapi_client.cli.quarantine import selection as ward

    _check(ids, every, feed, name, partition)
    result = run_async(
        ward.replay, ward.Choice(store, feed, name, partition), ward.imported(handler), ids
    )
    print(f"{result.handled} events handled, {result.failed} failed again and stay")
    if result.failed:
        raise typer.Exit(FAILURE)


def _check(
    ids: list[str] | None, every: bool, feed: str | None, name: str | None, partition: int | None
) -> None:
    if bool(ids) == every:
        raise typer.BadParameter("give IDs, or --all")
    if ids and (feed is not None or name is not None or partition is not None):
        raise typer.BadParameter("--feed, --name and --partition go with --all")
