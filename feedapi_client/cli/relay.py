"""``feedapi relay``: passes its arguments on to `feedapi_client.liftbridge.command`."""

from __future__ import annotations

import typer

from feedapi_client.cli.common.extras import run_adapter


def relay(context: typer.Context) -> None:
    """Publish a feed's events to a Liftbridge stream (extra liftbridge)."""
    run_adapter(context, "feedapi_client.liftbridge.command", "liftbridge")
