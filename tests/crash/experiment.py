"""Kill, restart, kill again; then look at what the database holds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.crash.application import application_class
from tests.crash.consumer import FENCED
from tests.crash.process import ConsumerProcess
from tests.crash.traffic import Traffic

_SIGNS_BEFORE_KILL = 60
_START_UP_SECONDS = 1.0


@dataclass
class Outcome:
    """What happened, and what came of it."""

    kills: int = 0
    fenced: int = 0
    splits: dict[str, int] = field(default_factory=dict)
    rotations: int = 0
    events: int = 0
    quarantined: int = 0
    lost: int = 0
    duplicated: int = 0
    disordered: int = 0
    seconds: float = 0.0

    @property
    def exactly_once(self) -> bool:
        """Each event is there once, in order within its entity."""
        return self.events > 0 and not (self.lost or self.duplicated or self.disordered)


Progress = Callable[[Outcome], object]


async def pull_the_plug(
    database: str,
    *,
    kills: int,
    cursor: str = "inside",
    poison: bool = False,
    seed: int | None = None,
    stop_when_damaged: bool = False,
    progress: Progress = lambda outcome: None,
) -> Outcome:
    """The experiment: `kills` times SIGKILL at random moments, then a run to the end of the feed.

    `cursor` says where the consumer saves it: inside the transaction of the effects, before it, or after it. With `poison` some events go into
    quarantine, where they must be exactly once like the others in the effects. `database` is emptied first.
    """
    options = ["--cursor", cursor, *(["--poison"] if poison else [])]
    random, outcome, started = Random(seed), Outcome(), time.monotonic()
    kind = application_class(database)
    await kind.create(database)
    application = kind(database)
    traffic = Traffic(random, split_every=max(2, kills // 6))
    with traffic.publisher.serve() as url:
        while outcome.kills < kills and not (stop_when_damaged and application.misplaced()):
            traffic.publish(random.randint(50, 250))
            _one_life(ConsumerProcess(url, database, *options), traffic, random, outcome)
            outcome.splits, outcome.rotations, outcome.events = (
                dict(traffic.splits),
                traffic.rotations,
                traffic.published.total(),
            )
            progress(outcome)
        while _to_the_end(ConsumerProcess(url, database, *options, "--to-the-end")) == FENCED:
            outcome.fenced += 1
    rows = [(row.entity, row.n) for row in application.rows()]
    put_aside = application.put_aside()
    await application.aclose()
    _compare(traffic.published, rows, put_aside, outcome)
    outcome.seconds = time.monotonic() - started
    return outcome


def _one_life(life: ConsumerProcess, traffic: Traffic, random: Random, outcome: Outcome) -> None:
    """Start a consumer, and kill it after some of its steps: sometimes before the first one."""
    signs_left = random.choice(
        (
            0,
            1,
            random.randint(2, 10),
            random.randint(2, _SIGNS_BEFORE_KILL),
            random.randint(2, _SIGNS_BEFORE_KILL),
        )
    )
    disturb_at = {random.randrange(signs_left) for _ in range(2)} if signs_left else set()
    if not disturb_at:
        traffic.disturb()
    with life as consumer:
        pause = random.uniform(0, 0.005) if signs_left else random.uniform(0, _START_UP_SECONDS)
        while signs_left > 0:
            signs = consumer.signs()
            if not signs:
                consumer.process.wait()
                break
            for _ in signs:
                signs_left -= 1
                traffic.publish(random.randint(0, 8))
                if signs_left in disturb_at:
                    traffic.disturb()
        if consumer.process.poll() is None:
            consumer.kill(after=pause)
            outcome.kills += 1
        elif consumer.process.returncode == FENCED:
            # A commit of the last life that the server carried out after this one had loaded its cursors.
            outcome.fenced += 1
        else:
            raise AssertionError(
                f"the consumer ended by itself with {consumer.process.returncode}: {consumer.errors()}"
            )


def _to_the_end(life: ConsumerProcess) -> int:
    with life as consumer:
        code = consumer.finish()
        assert code in (0, FENCED), f"the consumer ended with {code}: {consumer.errors()}"
        return code


def _compare(
    published: Counter[str],
    rows: list[tuple[str, int]],
    put_aside: list[tuple[str, int]],
    outcome: Outcome,
) -> None:
    found = Counter([*rows, *put_aside])
    outcome.quarantined = len(put_aside)
    outcome.events = published.total()
    outcome.lost = sum(
        (entity, n) not in found for entity, count in published.items() for n in range(count)
    )
    outcome.duplicated = sum(count - 1 for count in found.values())
    last: dict[str, int] = {}
    for entity, n in rows:
        outcome.disordered += n < last.get(entity, -1)
        last[entity] = n
