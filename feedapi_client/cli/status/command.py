"""The command ``feedapi status``."""

from __future__ import annotations

from typing import Annotated

import typer

from feedapi_client.cli.common.options import AuthEnv, HeaderEnv, Json, Name, V1Partitions, finite
from feedapi_client.cli.common.run_async import run_async

Target = Annotated[
    str,
    typer.Argument(
        metavar="MONITOR|URL",
        help="A monitor (localhost:9464), or with --store the URL of a feed.",
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="STORE",
        help="Ask the feed, and this cursor store, instead of a monitor; or env:NAME.",
    ),
]
Interval = Annotated[
    float,
    typer.Option(
        "--interval", min=0.1, callback=finite, metavar="SECONDS", help="Time between two looks."
    ),
]
Once = Annotated[
    bool, typer.Option("--once", help="Print it once; so it is where stdout is no terminal.")
]


def status(
    target: Target,
    store: Store = None,
    name: Name = None,
    interval: Interval = 2.0,
    once: Once = False,
    json: Json = False,
    auth_env: AuthEnv = None,
    header_env: HeaderEnv = None,
    v1_partitions: V1Partitions = None,
) -> None:
    """Show what a consumer does now, live, like top.

    From the monitor that runs beside it (--monitor of 'run', 'cat' and 'relay'): states, rates,
    failures, what needs attention first. Or, for a consumer without one, from the feed and the
    cursor store: how far each partition is committed. That asks the feed once for each partition.
    """
    from feedapi_client.cli.common.http_client import headers_from_environment
    from feedapi_client.cli.status.source import FeedAndStore, RunningMonitor
    from feedapi_client.cli.status.view import show

    headers = headers_from_environment(auth_env, header_env)
    source = (
        RunningMonitor(target, headers)
        if store is None
        else FeedAndStore(target, headers, store, name, v1_partitions)
    )
    try:
        run_async(show, source, interval, once, json)
    except KeyboardInterrupt:
        raise typer.Exit from None  # the way to leave a live view
