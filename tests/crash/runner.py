"""Kill a consumer, start it again, and check what its database holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from tests.crash.application import application_class
from tests.crash.comparison import Comparison
from tests.crash.consumer import FENCED, STEPS
from tests.crash.process import ConsumerProcess
from tests.crash.traffic import Traffic

_MAX_EARLIER_STEPS = 40
_START_UP_SECONDS = 0.2
_STEP_SECONDS = 0.005


@dataclass
class Outcome(Comparison):
    """What happened, and what the database holds."""

    kills: int = 0
    fenced: int = 0
    splits: dict[str, int] = field(default_factory=dict)
    rotations: int = 0
    quarantined: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class KillPoint:
    """When to kill a consumer: at a step, after it, or while the consumer starts.

    `step` is the step to kill at, None: during the start. `earlier` is the number of steps to let
    pass before. `moment` lets the process go on from the step for a random time, so that it dies
    anywhere, for example within a commit. Whatever the speed of the machine, the process has then
    reached the step.
    """

    step: bytes | None
    earlier: int = 0
    moment: bool = False


Progress = Callable[[Outcome], object]


async def run_crash_test(
    database: str,
    *,
    kills: int,
    cursor: str = "inside",
    poison: bool = False,
    threads: int = 0,
    by_key: bool = False,
    seed: int | None = None,
    stop_when_damaged: bool = False,
    progress: Progress = lambda outcome: None,
) -> Outcome:
    """Kill a consumer with SIGKILL again and again, then let one run to the end of the feed.

    Arguments:
        database: a PostgreSQL DSN or a SQLite file, which is emptied first.
        kills: how often.
        cursor: where the consumer saves it: "inside" the transaction of the effects, "before" it,
            or "after" it.
        poison: let the application fail at some events, which go into quarantine. They must be
            there exactly once, as the others in the effects.
        threads: consume without async, in so many threads; 0 consumes with async.
        by_key: handle events by key, and remember each one in the transaction of its effects.
        stop_when_damaged: kill no further once an event is lost or repeated.
        progress: called after each kill.
    """
    options = ["--cursor", cursor, *(["--poison"] if poison else [])]
    options += ["--threads", str(threads)] if threads else []
    options += ["--by-key"] if by_key else []
    random, outcome, started = Random(seed), Outcome(), time.monotonic()
    kind = application_class(database)
    await kind.create(database)
    application = kind(database)
    traffic = Traffic(random, split_every=max(2, kills // 6))
    points = kill_points(random)
    with traffic.publisher.serve() as url:
        while outcome.kills < kills and not (stop_when_damaged and application.misplaced()):
            traffic.publish(random.randint(50, 250))
            consumer = ConsumerProcess(url, database, *options)
            _run_until_killed(consumer, next(points), traffic, random, outcome)
            outcome.splits = dict(traffic.splits)
            outcome.rotations = traffic.rotations
            outcome.events = traffic.published.total()
            progress(outcome)
        while _run_to_the_end(ConsumerProcess(url, database, *options, "--to-the-end")) == FENCED:
            outcome.fenced += 1
    rows = [(row.entity, row.n) for row in application.rows()]
    quarantined = application.quarantined()
    await application.aclose()
    outcome.quarantined = len(quarantined)
    outcome.compare(traffic.published, rows, quarantined)
    outcome.seconds = time.monotonic() - started
    return outcome


def kill_points(random: Random) -> Iterator[KillPoint]:
    """Yield points endlessly, in random order, each kind of point once in each round."""
    while True:
        kinds = [(step, moment) for step in STEPS for moment in (False, True)]
        points = [
            KillPoint(step, random.randint(0, _MAX_EARLIER_STEPS), moment) for step, moment in kinds
        ]
        points.append(KillPoint(None))
        random.shuffle(points)
        yield from points


def _run_until_killed(
    process: ConsumerProcess, point: KillPoint, traffic: Traffic, random: Random, outcome: Outcome
) -> None:
    """Start a consumer, and kill it at a point."""
    traffic.disturb()
    with process as consumer:
        if point.step is None:
            time.sleep(random.uniform(0, _START_UP_SECONDS))
        elif not _run_to_point(consumer, point, traffic, random):
            # A commit of the killed consumer which the server carried out after this one had
            # loaded its cursors.
            assert consumer.process.returncode == FENCED, (
                f"the consumer ended with {consumer.process.returncode}: {consumer.errors()}"
            )
            outcome.fenced += 1
            return
        consumer.kill()
        outcome.kills += 1


def _run_to_point(
    consumer: ConsumerProcess, point: KillPoint, traffic: Traffic, random: Random
) -> bool:
    """Let a consumer go on to a point; False if it ended before."""
    steps = 0
    disturb_at = random.randint(0, point.earlier)
    while step := consumer.wait_for_step(when_idle=lambda: traffic.publish(10)):
        if steps == disturb_at:
            traffic.disturb()
        # Opening is the first step of all.
        if step == point.step and (steps >= point.earlier or step == STEPS[0]):
            if point.moment:
                consumer.let_go()
                time.sleep(random.uniform(0, _STEP_SECONDS))
            return True
        consumer.let_go()
        traffic.publish(random.randint(0, 8))
        steps += 1
    return False


def _run_to_the_end(process: ConsumerProcess) -> int:
    with process as consumer:
        code = consumer.finish()
        assert code in (0, FENCED), f"the consumer ended with {code}: {consumer.errors()}"
        return code
