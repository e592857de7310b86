"""``feedapi demo``: the whole library in some seconds, and a proof."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from feedapi_client.cli.report import FAILED, run


class Dialect(StrEnum):
    """The dialects that know splits."""

    V2_DRAFT = "v2-draft"
    V2_TOKEN = "v2-token"  # noqa: S105 - a dialect's name


class Sabotage(StrEnum):
    """Ways to keep the cursor outside the transaction of the effects."""

    CURSOR_FIRST = "cursor-first"
    CURSOR_LAST = "cursor-last"


def demo(
    dialect: Annotated[Dialect, typer.Option(help="How the publisher speaks.")] = Dialect.V2_TOKEN,
    events: Annotated[
        int, typer.Option(min=100, max=1_000_000, metavar="N", help="Events to publish.")
    ] = 20_000,
    seconds: Annotated[
        float, typer.Option(min=0.5, max=3600, metavar="S", help="Time to publish them in.")
    ] = 6.0,
    crashes: Annotated[
        int,
        typer.Option(
            min=0,
            max=100,
            metavar="N",
            help="How often the consumer dies in the middle of a batch.",
        ),
    ] = 4,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Makes the publisher's pages reproducible.")
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Lines of text, no live view (as always when stdout is no terminal)."
        ),
    ] = False,
    sabotage: Annotated[
        Sabotage | None,
        typer.Option(
            help="Save the cursor outside the transaction, before or after the effects: the proof has to fail."
        ),
    ] = None,
) -> None:
    """Publish, split, rotate, crash, consume, and prove that each entity's events came in order and once.

    A publisher on the loopback interface splits a partition by each method while a consumer reads it, makes tokens stale, breaks off responses, and
    never answers alike twice. The consumer keeps its effects and its cursors in one SQLite file, and dies now and then between the two. In the end the
    effects are compared with what was published. Exit code 1 when they differ.
    """
    from feedapi_client.cli.demo_view import LiveView, PlainView
    from feedapi_client.cli.demonstration import Demonstration
    from feedapi_client.cli.report import CommandError

    try:
        import feedapi_client.testing.publisher.server  # noqa: F401
    except ImportError as missing:
        raise CommandError(str(missing)) from None
    show = Demonstration(
        dialect=dialect.value,
        events=events,
        seconds=seconds,
        crashes=crashes,
        seed=seed,
        sabotage=sabotage.value if sabotage is not None else None,
    )
    view = PlainView(show) if plain or not sys.stdout.isatty() else LiveView(show)
    with view:
        verdict = run(show.run)
    view.conclude(verdict)
    if not verdict.proved:
        raise typer.Exit(FAILED)
