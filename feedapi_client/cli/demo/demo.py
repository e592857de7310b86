"""The command ``feedapi demo``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from feedapi_client.cli.exit_codes import FAILURE
from feedapi_client.cli.extras import require_publisher
from feedapi_client.cli.feed_options import finite
from feedapi_client.cli.reporting import run_async


class DemoDialect(StrEnum):
    """The dialects that have splits."""

    V2_DRAFT = "v2-draft"
    V2_TOKEN = "v2-token"  # noqa: S105 - a dialect's name


class Sabotage(StrEnum):
    """Ways to save the cursor outside the transaction of the effects."""

    CURSOR_FIRST = "cursor-first"
    CURSOR_LAST = "cursor-last"


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Options of ``feedapi demo``."""

    dialect: Annotated[
        DemoDialect, typer.Option("--dialect", help="The dialect that the publisher uses.")
    ] = DemoDialect.V2_TOKEN
    events: Annotated[
        int, typer.Option(min=100, max=1_000_000, metavar="N", help="Events to publish.")
    ] = 20_000
    seconds: Annotated[
        float,
        typer.Option(
            min=0.5, max=3600, callback=finite, metavar="S", help="Time to publish them in."
        ),
    ] = 6.0
    crashes: Annotated[
        int,
        typer.Option(
            min=0,
            max=100,
            metavar="N",
            help="How often the consumer crashes in the middle of a batch.",
        ),
    ] = 4
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Makes the publisher's pages reproducible.")
    ] = None
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Lines of text, no live view (as always when stdout is no terminal)."
        ),
    ] = False
    sabotage: Annotated[
        Sabotage | None,
        typer.Option(
            "--sabotage",
            help=(
                "Save the cursor outside the transaction, before or after the effects: "
                "the proof has to fail."
            ),
        ),
    ] = None
    instances: Annotated[
        int,
        typer.Option(
            "--instances",
            min=1,
            max=16,
            metavar="N",
            help=(
                "Processes that share the feed. Instead of crashes, every other one is killed "
                "and the others are stopped; another one replaces it."
            ),
        ),
    ] = 1
    spark: Annotated[
        bool,
        typer.Option("--spark", help="Read the feed into a Spark DataFrame (extra spark-local)."),
    ] = False


def demo(options: Demo) -> int:
    """Publish, split, rotate, crash, consume; prove each entity's events came in order and once.

    A publisher on the loopback interface splits partitions by each method while a consumer reads
    them. It makes tokens stale, breaks off responses, and never gives the same response twice. The
    consumer keeps its effects and its cursors in one SQLite file, and crashes now and then between
    the two. In the end the effects are compared with what was published. Exit code 1 when they
    differ.

    With several instances each is a process of its own. They divide the partitions, and take over
    those of an instance that is stopped or killed.

    With --spark the feed is read into a DataFrame instead, with the same proof.
    """
    if options.instances > 1 and options.sabotage is not None:
        raise typer.BadParameter("--sabotage is for one instance")
    require_publisher()
    if options.spark:
        return _demo_of_spark(options)
    from feedapi_client.cli.demo.demo_scenario import DemoScenario
    from feedapi_client.cli.demo.live_view import LiveView, PlainView

    scenario = DemoScenario(
        dialect=options.dialect.value,
        events=options.events,
        seconds=options.seconds,
        crashes=options.crashes,
        seed=options.seed,
        sabotage=options.sabotage.value if options.sabotage is not None else None,
        instances=options.instances,
    )
    lines = options.plain or not sys.stdout.isatty()
    view = PlainView(scenario) if lines else LiveView(scenario)
    with view:
        verdict = run_async(scenario.run)
    view.conclude(verdict)
    return 0 if verdict.proved else FAILURE


def _demo_of_spark(options: Demo) -> int:
    from feedapi_client.cli.demo.demo_scenario import read_with_spark
    from feedapi_client.cli.demo.proof import conclusion_of_spark

    verdict = read_with_spark(options.dialect.value, options.events, options.seed)
    for line in conclusion_of_spark(verdict):
        print(line)
    return 0 if verdict.proved else FAILURE
