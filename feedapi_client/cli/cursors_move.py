"""``feedapi cursors move``: keep the cursors of a feed that has another URL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import orjson
import typer

from feedapi_client.cli.escape import shown_line
from feedapi_client.cli.feed_options import checked_url
from feedapi_client.cli.reporting import report
from feedapi_client.cli.store_options import BesideInstances, StorePlace


@dataclass(frozen=True, kw_only=True)
class CursorsMove:
    """Options of ``feedapi cursors move``."""

    old_url: Annotated[
        str, typer.Argument(metavar="OLD_URL", help="The feed's former URL, as 'ls' shows it.")
    ]
    new_url: Annotated[
        str, typer.Argument(metavar="NEW_URL", help="The URL that consumers use from now on.")
    ]
    place: StorePlace
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Only the cursors of this consumer."),
    ] = None
    selection: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--selection",
            metavar="OLD NEW",
            help=(
                "Only the cursors of the selection of events OLD, which become those of NEW: each "
                "as JSON, as 'export' prints it under filters; {} is all events."
            ),
        ),
    ] = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete cursors that NEW_URL has already.")
    ] = False
    force: BesideInstances = False


async def cursors_move(options: CursorsMove) -> None:
    """Keep the cursors of a feed that moved: those of OLD_URL become those of NEW_URL.

    Of all its consumers, and all their filters, in one step or not at all. feed:NAME stands for
    a feed that its consumers give a feed_name. With --selection the URLs may be the same: for a
    consumer that selects other events from now on. It goes on behind the events that it had, and
    gets none of the new ones that lie before.
    """
    from feedapi_client.model import FeedKey
    from feedapi_client.operations import move

    old, new = options.old_url, options.new_url
    for url, argument in ((old, "OLD_URL"), (new, "NEW_URL")):
        if not _is_feed_name(url):
            checked_url(url, argument)
    before = after = selection = None
    if options.selection is not None:
        before, after = map(_selection, options.selection)
        selection = before, after
    if FeedKey(old).url == FeedKey(new).url and before == after:
        raise typer.BadParameter("OLD_URL and NEW_URL have the same cursors")
    async with options.place.open() as store:
        moved = await move(
            store,
            old,
            new,
            name=options.name,
            selection=selection,
            overwrite=options.overwrite,
            force=options.force,
        )
    for feed in moved:
        report(f"{shown_line(feed.key)}: {len(feed.positions)} positions moved here")


def _selection(text: str) -> dict[str, str]:
    """Return a selection of events. Raises `typer.BadParameter` for what is none."""
    try:
        pairs = orjson.loads(text)
    except ValueError:
        pairs = None
    if not isinstance(pairs, dict) or not all(isinstance(each, str) for each in pairs.values()):
        raise typer.BadParameter(
            "--selection takes two JSON objects of texts, such as '{}' "
            '\'{"event-types":"created;paid"}\''
        )
    return pairs


def _is_feed_name(text: str) -> bool:
    """Whether this is feed:NAME. Raises `typer.BadParameter` for a name that no feed can have."""
    from feedapi_client.errors import NegotiationError
    from feedapi_client.model import FeedKey

    try:
        return FeedKey(text).feed_name is not None
    except NegotiationError as error:
        if text.startswith("feed:"):
            raise typer.BadParameter(error.message) from None
        return False
