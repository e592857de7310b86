"""The commands of ``feedapi quarantine`` and their options. Each one's work is in its own module.

A quarantine is elsewhere called a dead-letter queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from feedapi_client.cli.common.errors import CommandGroup
from feedapi_client.cli.common.options import Feed, Json, Name, Store, Yes
from feedapi_client.cli.examples import epilog

if TYPE_CHECKING:
    from feedapi_client.cli.quarantine.selection import Selection

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help=(
        "Show quarantined events, which the application failed to handle (a dead-letter queue), "
        "and replay or drop them."
    ),
)

Id = Annotated[str, typer.Argument(metavar="ID")]
Ids = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Events as 'ls' lists them.")
]
All = Annotated[
    bool,
    typer.Option("--all", help="All events, or those that --feed, --name and --partition choose."),
]
Partition = Annotated[
    int | None,
    typer.Option(
        "--partition", "-p", min=0, max=32767, metavar="ID", help="Only of this partition."
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Print the payload alone, byte for byte.")]
Handler = Annotated[
    str,
    typer.Option(
        "--handler",
        metavar="MODULE:FUNCTION",
        help="The application's 'async def handle(batch)', searched in this directory too.",
    ),
]


@app.command("ls", epilog=epilog("quarantine ls"))
def ls(
    store: Store,
    feed: Feed = None,
    name: Name = None,
    partition: Partition = None,
    json: Json = False,
) -> None:
    """List events: where they come from, and what went wrong.

    Payloads and error texts are not listed: see 'show'.
    """
    from feedapi_client.cli.quarantine.ls import print_events

    print_events(_selection(store, feed, name, partition), json=json)


@app.command("show", epilog=epilog("quarantine show"))
def show(id: Id, store: Store, raw: Raw = False) -> None:
    """Print one event as JSON: where it comes from, the error, headers and payload."""
    from feedapi_client.cli.quarantine.show import show_event

    show_event(_selection(store), id, raw=raw)


@app.command("drop", epilog=epilog("quarantine drop"))
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
    from feedapi_client.cli.quarantine.drop import drop_events

    _check(ids, every, feed, name, partition)
    drop_events(_selection(store, feed, name, partition), ids, confirm=not yes)


@app.command("replay", epilog=epilog("quarantine replay"))
def replay(
    store: Store,
    handler: Handler,
    ids: Ids = None,
    every: All = False,
    feed: Feed = None,
    name: Name = None,
    partition: Partition = None,
) -> None:
    """Call the application's handler with events once more.

    They are replayed in the order in which they were quarantined. Those that fail again stay, and
    the exit code is 1 then.
    """
    from feedapi_client.cli.quarantine.replay import replay_events

    _check(ids, every, feed, name, partition)
    replay_events(_selection(store, feed, name, partition), ids, handler)


def _check(
    ids: list[str] | None, every: bool, feed: str | None, name: str | None, partition: int | None
) -> None:
    if bool(ids) == every:
        raise typer.BadParameter("give IDs, or --all")
    if ids and (feed is not None or name is not None or partition is not None):
        raise typer.BadParameter("--feed, --name and --partition go with --all")


def _selection(
    store: str, feed: str | None = None, name: str | None = None, partition: int | None = None
) -> Selection:
    from feedapi_client.cli.common.feed_choice import FeedChoice
    from feedapi_client.cli.quarantine.selection import Selection

    return Selection(store, FeedChoice(feed, name), partition)
