"""``feedapi relay``. The module `feedapi_client.liftbridge.command` parses its arguments and runs it."""

from __future__ import annotations

import typer

from feedapi_client.cli.common.extras import run_adapter


def relay(context: typer.Context) -> None:
    """Put a feed's events onto a Liftbridge stream (extra liftbridge)."""
    run_adapter(context, "feedapi_client.liftbridge.command", "liftbridge")
