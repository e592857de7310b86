"""``feedapi serve``: an example feed, to try consumers with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from feedapi_client.arguments import environment_value
from feedapi_client.cli.extras import require_publisher
from feedapi_client.cli.feed_options import finite
from feedapi_client.cli.reporting import run_async


class ServedDialect(StrEnum):
    """The dialects that a publisher can use."""

    V1 = "v1"
    V2_DRAFT = "v2-draft"
    V2_TOKEN = "v2-token"  # noqa: S105 - a dialect's name


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Options of ``feedapi serve``."""

    dialect: Annotated[
        ServedDialect, typer.Option("--dialect", help="The dialect that the publisher uses.")
    ] = ServedDialect.V2_TOKEN
    partitions: Annotated[int, typer.Option(min=1, max=1024, help="Partitions at the start.")] = 2
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0 takes a free one.")
    ] = 0
    history: Annotated[
        int, typer.Option(min=0, metavar="N", help="Events that are published before the start.")
    ] = 1000
    rate: Annotated[
        float, typer.Option(min=0, callback=finite, metavar="N", help="New events per second.")
    ] = 10.0
    split_every: Annotated[
        float,
        typer.Option(
            min=0,
            callback=finite,
            metavar="SECONDS",
            help="Split a partition, by the two methods alternately; 0: never.",
        ),
    ] = 0.0
    rotate_every: Annotated[
        float,
        typer.Option(
            min=0, callback=finite, metavar="SECONDS", help="Make the token stale; 0: never."
        ),
    ] = 0.0
    page_size: Annotated[int, typer.Option(min=1, metavar="N", help="Events per response.")] = 1000
    checkpoint_every: Annotated[
        int, typer.Option(min=1, metavar="N", help="Events between two cursors.")
    ] = 100
    vary: Annotated[
        bool,
        typer.Option("--vary", help="Make every response different, as the specification allows."),
    ] = False
    stream: Annotated[
        bool, typer.Option("--stream", help="Offer responses that stay open (v2-draft, v2-token).")
    ] = False
    bearer_env: Annotated[
        str | None,
        typer.Option(
            "--bearer-env",
            metavar="NAME",
            help="Require the bearer token in this environment variable.",
        ),
    ] = None


def serve(options: Serve) -> None:
    """Serve an example feed on the loopback interface, to try consumers with, until Ctrl-C.

    The first line on stdout is its URL.
    """
    dialect = options.dialect
    if dialect is ServedDialect.V1 and options.split_every:
        raise typer.BadParameter("--split-every: a v1 feed has no splits")
    require_publisher()
    from feedapi_client.cli.example_feed import ExampleFeed, serve_feed
    from feedapi_client.testing import Publisher

    publisher = Publisher(
        options.partitions,
        dialect=dialect.value,
        page_size=options.page_size,
        checkpoint_every=options.checkpoint_every,
        vary=options.vary,
        stream=options.stream,
        bearer=_bearer_token(options.bearer_env),
        filters=("entity", "type") if dialect is ServedDialect.V2_DRAFT else (),
    )
    feed = ExampleFeed(publisher)
    feed.publish(options.history)
    times = (options.rate, options.split_every, options.rotate_every)
    try:
        run_async(serve_feed, feed, options.port, *times)
    except KeyboardInterrupt:
        raise typer.Exit from None


def _bearer_token(variable: str | None) -> str | None:
    if variable is None:
        return None
    try:
        value = environment_value(variable, "--bearer-env")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return value.removeprefix("Bearer ").strip()
