"""The command ``feedapi serve``."""

from __future__ import annotations

import os

import typer

from feedapi_client.cli.common.extras import require_publisher
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.serve.options import (
    BearerEnv,
    CheckpointEvery,
    Dialect,
    DialectOption,
    Entities,
    History,
    MaxEvents,
    PageSize,
    Partitions,
    Port,
    Rate,
    RotateEvery,
    SplitEvery,
    Stream,
    Vary,
)


def serve(
    dialect: DialectOption = Dialect.V2_TOKEN,
    partitions: Partitions = 2,
    port: Port = 0,
    history: History = 1000,
    rate: Rate = 10.0,
    entities: Entities = 100,
    split_every: SplitEvery = 0.0,
    rotate_every: RotateEvery = 0.0,
    page_size: PageSize = 1000,
    checkpoint_every: CheckpointEvery = 100,
    vary: Vary = False,
    stream: Stream = False,
    bearer_env: BearerEnv = None,
    max_events: MaxEvents = 1_000_000,
) -> None:
    """Serve an example feed on the loopback interface, to try consumers with, until Ctrl-C.

    The first line on stdout is its URL.
    """
    if dialect is Dialect.V1 and split_every:
        raise typer.BadParameter("--split-every: a v1 feed has no splits")
    require_publisher()
    from feedapi_client.cli.serve.example_feed import ExampleFeed
    from feedapi_client.cli.serve.server import serve_feed
    from feedapi_client.testing import Publisher

    publisher = Publisher(
        partitions,
        dialect=dialect.value,
        page_size=page_size,
        checkpoint_every=checkpoint_every,
        vary=vary,
        stream=stream,
        bearer=_bearer_token(bearer_env),
        filters=("entity", "type") if dialect is Dialect.V2_DRAFT else (),
    )
    feed = ExampleFeed(publisher, entities=entities, max_events=max_events)
    feed.publish(history)
    try:
        run_async(serve_feed, feed, port, rate, split_every, rotate_every)
    except KeyboardInterrupt:
        raise typer.Exit from None


def _bearer_token(variable: str | None) -> str | None:
    if variable is None:
        return None
    value = os.environ.get(variable, "")
    if not value:
        raise typer.BadParameter(f"--bearer-env: the environment variable {variable} is not set")
    return value.removeprefix("Bearer ").strip()
