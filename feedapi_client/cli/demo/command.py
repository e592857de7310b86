"""The command ``feedapi demo``."""

from __future__ import annotations

import sys

import typer

from feedapi_client.cli.common.exit_codes import FAILURE
from feedapi_client.cli.common.extras import require_publisher
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.demo.options import (
    Crashes,
    Dialect,
    DialectOption,
    Events,
    InstanceCount,
    Plain,
    SabotageOption,
    Seconds,
    Seed,
)


def demo(
    dialect: DialectOption = Dialect.V2_TOKEN,
    events: Events = 20_000,
    seconds: Seconds = 6.0,
    crashes: Crashes = 4,
    seed: Seed = None,
    plain: Plain = False,
    sabotage: SabotageOption = None,
    instances: InstanceCount = 1,
) -> None:
    """Publish, split, rotate, crash, consume; prove each entity's events came in order and once.

    A publisher on the loopback interface splits partitions by each method while a consumer reads
    them. It makes tokens stale, breaks off responses, and never gives the same response twice. The
    consumer keeps its effects and its cursors in one SQLite file, and crashes now and then between
    the two. In the end the effects are compared with what was published. Exit code 1 when they
    differ.

    With several instances each is a process of its own. They divide the partitions, and take over
    those of an instance that is stopped or killed.
    """
    if instances > 1 and sabotage is not None:
        raise typer.BadParameter("--sabotage is for one instance")
    require_publisher()
    from feedapi_client.cli.demo.live_view import LiveView
    from feedapi_client.cli.demo.plain_view import PlainView
    from feedapi_client.cli.demo.scenario import Scenario

    scenario = Scenario(
        dialect=dialect.value,
        events=events,
        seconds=seconds,
        crashes=crashes,
        seed=seed,
        sabotage=sabotage.value if sabotage is not None else None,
        instances=instances,
    )
    view = PlainView(scenario) if plain or not sys.stdout.isatty() else LiveView(scenario)
    with view:
        verdict = run_async(scenario.run)
    view.conclude(verdict)
    if not verdict.proved:
        raise typer.Exit(FAILURE)
