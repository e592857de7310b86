"""The command ``feedapi demo``."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum

from feedapi_client.cli.command import FAILURE, command, option, run_async


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

    dialect: DemoDialect = option(
        help="The dialect that the publisher uses.", default=DemoDialect.V2_TOKEN
    )
    events: int = option("N", "Events to publish.", default=20000, min=100, max=1000000)
    seconds: float = option("S", "Time to publish them in.", default=6.0, min=0.5, max=3600)
    crashes: int = option(
        "N", "How often the consumer crashes in the middle of a batch.", default=4, min=0, max=100
    )
    seed: int | None = option("N", "Makes the publisher's pages reproducible.")
    plain: bool = option(
        help="Lines of text, no live view (as always when stdout is no terminal).", default=False
    )
    sabotage: Sabotage | None = option(
        help="Save the cursor outside the transaction, before or after the effects: the proof has "
        "to fail."
    )
    instances: int = option(
        "N",
        "Processes that share the feed. Instead of crashes, every other one is killed and the "
        "others are stopped; another one replaces it.",
        default=1,
        min=1,
        max=16,
    )
    spark: bool = option(
        help="Read the feed into a Spark DataFrame (extra spark-local).", default=False
    )

    def __post_init__(self) -> None:
        if self.instances > 1 and self.sabotage is not None:
            raise ValueError("--sabotage is for one instance")


@command("demo", "demo --events 100000 --seed 7", "demo --sabotage cursor-last")
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
