"""``feedapi serve``: a publisher to play with."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from feedapi_client.cli.common.run_async import run_async


class Dialect(StrEnum):
    """The three dialects."""

    V1 = "v1"
    V2_DRAFT = "v2-draft"
    V2_TOKEN = "v2-token"  # noqa: S105 - a dialect's name


def serve(
    dialect: Annotated[Dialect, typer.Option(help="How the publisher speaks.")] = Dialect.V2_TOKEN,
    partitions: Annotated[int, typer.Option(min=1, max=1024, help="Partitions at the start.")] = 2,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0 takes a free one.")
    ] = 0,
    history: Annotated[
        int, typer.Option(min=0, metavar="N", help="Events that are there from the start.")
    ] = 1000,
    rate: Annotated[float, typer.Option(min=0, metavar="N", help="New events a second.")] = 10.0,
    entities: Annotated[
        int, typer.Option(min=1, metavar="N", help="Entities that the events are about.")
    ] = 100,
    split_every: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Split a partition, by one method and the other in turn; 0: never.",
        ),
    ] = 0.0,
    rotate_every: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Make the token stale; 0: never.")
    ] = 0.0,
    page_size: Annotated[int, typer.Option(min=1, metavar="N", help="Events a response.")] = 1000,
    checkpoint_every: Annotated[
        int, typer.Option(min=1, metavar="N", help="Events between two cursors.")
    ] = 100,
    vary: Annotated[
        bool,
        typer.Option("--vary", help="No two responses are the same, as the specification allows."),
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Offer responses that stay open (v2-draft, v2-token).")
    ] = False,
    bearer_env: Annotated[
        str | None,
        typer.Option(
            "--bearer-env",
            metavar="NAME",
            help="Ask for the bearer token in this environment variable.",
        ),
    ] = None,
    max_events: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Stop publishing after so many: all are kept in memory."
        ),
    ] = 1_000_000,
) -> None:
    """Serve a feed on the loopback interface, to try consumers with. Ctrl-C ends it. The first line on stdout is its URL."""
    from feedapi_client.cli.common.errors import CommandError
    from feedapi_client.cli.serve.example_feed import Playground

    if dialect is Dialect.V1 and split_every:
        raise typer.BadParameter("--split-every: a v1 feed has no splits")
    try:
        from feedapi_client.testing import Publisher, Serving
    except ImportError as missing:
        raise CommandError(str(missing)) from None
    del Serving
    publisher = Publisher(
        partitions,
        dialect=dialect.value,
        page_size=page_size,
        checkpoint_every=checkpoint_every,
        vary=vary,
        stream=stream,
        bearer=_bearer(bearer_env),
        filters=("entity", "type") if dialect is Dialect.V2_DRAFT else (),
    )
    playground = Playground(
        publisher,
        rate=rate,
        entities=entities,
        split_every=split_every,
        rotate_every=rotate_every,
        max_events=max_events,
    )
    playground.publish(min(history, max_events))
    try:
        run_async(playground.serve, port)
    except KeyboardInterrupt:
        raise typer.Exit from None


def _bearer(variable: str | None) -> str | None:
    import os

    if variable is None:
        return None
    value = os.environ.get(variable, "")
    if not value:
        raise typer.BadParameter(f"--bearer-env: the environment variable {variable} is not set")
    return value.removeprefix("Bearer ").strip()
