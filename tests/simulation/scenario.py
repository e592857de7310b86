"""A history as data: what a seed generates, what is printed, and what is shrunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any, Literal, get_args

from tests.simulation.clock import Backend
from tests.simulation.faults import FETCH_ONLY, FaultKind
from tests.simulation.manners import Manners, drawn
from tests.simulation.world import Dialect

Way = Literal["batches", "run", "events", "keys"]

_FAULTS: tuple[FaultKind, ...] = get_args(FaultKind)
_METHODS = ("starts-after", "cursor-from")
LEASE_SECONDS = 10.0
"""The leases of most instances."""
_PAUSES = (0.0, 0.02, 0.02, 0.3, 0.3, 2.0, 2.0, 10.0)
_LIFE = ("kill", "cancel", "cancel-natively", "stop", "leave", "reenter", "pause", "second")


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happens, some seconds after the step before it.

    Attributes:
        after: seconds since the step before.
        do: what happens: the name of a method of `History`.
        how: its arguments.
    """

    after: float
    do: str
    how: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        how = ", ".join(f"{name}={value!r}" for name, value in self.how.items())
        return f"after {self.after:g} s: {self.do}({how})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What stays the same during a history. The defaults are those of the plainest one.

    Attributes:
        partitions: how many the feed has at the start.
        dialect: of the publisher at the start.
        last_cursor: whether discovery says where closed partitions end.
        stream: whether the publisher offers streams and the consumer asks for them.
        page_size, checkpoint_every, vary: see `PageStyle`.
        latency: longest time of a request without a fault, in seconds.
        way: how the application consumes.
        transactional: whether it keeps effects and cursors in one transaction.
        store_latency: longest time of an operation of its database, in seconds.
        reply_latency: longest time from the effect of a save until it returns.
        handling: longest time that it handles a batch, in seconds.
        impatience: the part of its calls that are cancelled and made again.
        concurrent: `Limits.max_concurrent_fetches`.
        batch_bytes: `Limits.max_batch_bytes`.
        batch_events: `Limits.max_batch_events`.
        buffer_bytes: `Limits.max_buffered_bytes`.
        padding: see `PageStyle`.
        selected: whether the consumer selects events by type.
        start: where the consumer begins. With "last" all that is published before its first
            positions are saved counts as read.
        whole_lineage: see `World`.
        stubborn: whether the application iterates on after an error of its store.
        on_failure: what `FeedConsumer.run` does when the handler fails.
        flaky: the part of the batches whose handler fails, while there are faults.
        poison: whether the handler fails for some events each time; see `is_poison`.
        commit_every: batches that are committed at once, in one transaction ("batches").
        rollbacks: the part of the transactions that are rolled back, while there are faults.
        careless: whether the application goes on after that, as if it had committed. The library
            can't know: what it did not apply can come late, and after the events of a child.
        on_error: see `FeedConsumer`.
        refused_for, give_up_after: see `RetryPolicy`.
        moving_cursors, noisy: see `World`.
        ordered: see `FeedConsumer`.
        chosen: how many of the first partitions are read; 0: all, also those that come later.
        instances: how many processes share the feed; 0: one that doesn't share it.
        follow: see `FeedConsumer`. Without it a process starts again whenever it has ended.
        mixed: whether each process has options of its own, as while a new version is rolled out.
        lock_seconds: how long a statement waits for a locked row (`instances`); 0: for ever.
        handover, lease, rebalance: `Share.handover_seconds` and so on.
        failing: the part of all requests that fails all the time, also when all faults have ended.
        manners: see `Manners`.
        in_flight: `max_in_flight` of ``run_by_key``, for the way "keys".
        hangs: seconds for which one event is handled, while there are faults, for the way "keys".
    """

    partitions: int = 1
    dialect: Dialect = "v2-token"
    last_cursor: bool = True
    stream: bool = False
    page_size: int = 20
    checkpoint_every: int = 4
    vary: bool = False
    latency: float = 0.02
    way: Way = "batches"
    transactional: bool = True
    store_latency: float = 0.002
    reply_latency: float = 0.0
    handling: float = 0.0
    impatience: float = 0.0
    concurrent: int = 64
    batch_bytes: int = 1024 * 1024
    batch_events: int | None = None
    buffer_bytes: int = 64 * 1024 * 1024
    padding: int = 0
    selected: bool = False
    start: Literal["first", "last"] = "first"
    whole_lineage: bool = True
    stubborn: bool = False
    on_failure: Literal["raise", "retry", "quarantine", "retry, then quarantine"] = "raise"
    flaky: float = 0.0
    poison: bool = False
    commit_every: int = 1
    rollbacks: float = 0.0
    careless: bool = False
    on_error: Literal["raise", "park"] = "raise"
    refused_for: float = 60.0
    give_up_after: float | None = None
    moving_cursors: bool = False
    noisy: bool = False
    ordered: bool = True
    chosen: int = 0
    instances: int = 0
    follow: bool = True
    mixed: bool = False
    lock_seconds: float = 0.0
    handover: float = 15.0
    lease: float = LEASE_SECONDS
    rebalance: float = 1.0
    failing: float = 0.0
    manners: Manners = field(default_factory=Manners)
    in_flight: int = 10_000
    hangs: float = 0.0

    def __str__(self) -> str:
        """Return the settings that are not the defaults."""
        plain = Settings()
        given = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != getattr(plain, f.name)
        ]
        return f"Settings({', '.join(given)})"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A whole history. `seed` draws what the steps leave open: times, orders, pages, jitter."""

    seed: str
    settings: Settings
    steps: tuple[Step, ...]
    backend: Backend = "asyncio"

    def __str__(self) -> str:
        lines = [f"seed {self.seed!r} on {self.backend}", str(self.settings)]
        return "\n".join(lines + [f"{n}. {step}" for n, step in enumerate(self.steps, 1)])


def generate(seed: int, backend: Backend = "asyncio") -> Scenario:
    """Return the scenario of a seed."""
    random = Random(f"scenario {seed}")
    settings = _settings(random)
    settings = replace(settings, **_rarer(random, settings))
    # Each kind of trouble is off in most histories: with all of them on, one hides another.
    kinds: list[FaultKind] = [kind for kind in _FAULTS if random.random() < 0.25]
    life = [kind for kind in _LIFE if random.random() < 0.3]
    store_fails = random.random() < 0.25
    merges = settings.moving_cursors and random.random() < 0.3
    steps = [Step(0.0, "publish", _events(random))]
    for _ in range(random.randint(3, 12)):
        step = _step(random, kinds, life, store_fails=store_fails)
        if merges and step.do == "split" and random.random() < 0.5:
            step = Step(step.after, "merge", {"which": random.randrange(8)})
        if settings.selected and step.do == "deploy":
            step = Step(step.after, "deploy", {**step.how, "dialect": "v2-token"})
        steps.append(step)
    # Drawn apart, so that the seeds of the histories without them stay what they were.
    settings, steps = _with_options(Random(f"options {seed}"), settings, steps)
    settings, steps = _with_batches_and_grace(Random(f"batches {seed}"), settings, steps)
    settings, steps = _with_manners(Random(f"manners {seed}"), settings, steps)
    settings, steps = _with_incidents(Random(f"incidents {seed}"), settings, steps)
    settings = replace(settings, failing=_failing(Random(f"failing {seed}"), settings))
    return Scenario(str(seed), settings, tuple(steps), backend)


def _settings(random: Random) -> Settings:
    dialect: Dialect = random.choice(("v1", "v2-draft", "v2-token", "v2-token"))
    way: Way = random.choice(("batches", "batches", "run", "run", "events"))
    return Settings(
        partitions=random.choice((1, 1, 2, 3, 4, 12)),
        dialect=dialect,
        last_cursor=random.random() < 0.7,
        stream=random.random() < 0.25,
        page_size=random.choice((1, 5, 20, 100)),
        checkpoint_every=random.choice((1, 4, 30)),
        vary=random.random() < 0.6,
        latency=random.choice((0.005, 0.02, 0.3)),
        way=way,
        transactional=way != "events" and random.random() < 0.7,
        store_latency=random.choice((0.001, 0.01, 0.2)),
        handling=random.choice((0.0, 0.01, 0.3, 1.0)),
        impatience=random.choice((0.0, 0.0, 0.1, 0.5)),
        concurrent=random.choice((1, 2, 64)),
        batch_bytes=random.choice((1, 1_000, 1024 * 1024)),
        stubborn=random.random() < 0.3,
    )


def _rarer(random: Random, settings: Settings) -> dict[str, Any]:
    """Return the settings of what is off in most histories."""
    changes: dict[str, Any] = {
        "moving_cursors": random.random() < 0.25,
        "noisy": random.random() < 0.2,
        "on_error": "park" if random.random() < 0.15 else "raise",
    }
    if random.random() < 0.15:
        changes |= {"refused_for": 2.0, "give_up_after": random.choice((2.0, 5.0))}
    if random.random() < 0.2:
        changes |= {"buffer_bytes": random.choice((60_000, 200_000)), "padding": 200}
    if settings.dialect == "v2-token" and random.random() < 0.25:
        changes["selected"] = True
    if random.random() < 0.15:
        changes["start"] = "last"
    if settings.way == "run" and settings.transactional and random.random() < 0.5:
        on_failure = random.choice(("raise", "retry", "quarantine", "retry, then quarantine"))
        poison = "quarantine" in on_failure and random.random() < 0.5
        changes |= {"on_failure": on_failure, "poison": poison}
        changes["flaky"] = random.choice((0.0, 0.05, 0.3))
    if settings.transactional and random.random() < 0.2:
        changes["rollbacks"] = 0.3
    if settings.way == "batches" and random.random() < 0.25:
        changes["commit_every"] = random.choice((2, 5))
    if settings.impatience and random.random() < 0.5:
        changes["reply_latency"] = random.choice((0.004, 0.2))
    return changes


def _failing(random: Random, settings: Settings) -> float:
    """Return the part of the requests that fails all the time, in one of three histories.

    Not of one that gives up soon: some in a row fail now and then.
    """
    share = random.choice((0.005, 0.02, 0.05))
    return share if random.random() < 1 / 3 and settings.give_up_after is None else 0.0


def _events(random: Random) -> dict[str, Any]:
    return {"count": random.randint(1, 40), "entities": random.choice((1, 3, 12))}


def _step(
    random: Random, kinds: Sequence[FaultKind], life: Sequence[str], *, store_fails: bool
) -> Step:
    after = round(random.choice(_PAUSES) * random.random(), 3)
    what = random.random()
    if what < 0.35:
        return Step(after, "publish", _events(random))
    if what < 0.5:
        method = random.choice(("starts-after", "cursor-from"))
        how = {"which": random.randrange(8), "parts": random.randint(1, 3), "method": method}
        return Step(after, "split", how)
    if what < 0.58:
        dialect = random.choice(("v2-token", "v2-token", "v2-draft"))
        return Step(after, "deploy", {"dialect": dialect, "seconds": random.choice((0, 1, 10))})
    if what < 0.75 and kinds:
        return Step(after, "fault", _fault(random, random.choice(kinds)))
    if what < 0.77 and store_fails:
        return Step(after, "store_stalls", {"seconds": random.choice((1.0, 20.0))})
    if what < 0.8 and store_fails:
        share, seconds = random.choice((0.1, 0.5, 1.0)), random.choice((0.1, 3.0))
        return Step(after, "store_fails", {"share": share, "seconds": seconds})
    if what < 0.95 and life:
        kind = random.choice(life)
        if kind == "second":
            return Step(after, "second", {"seconds": random.choice((0.5, 3.0, 20.0))})
        return Step(after, "life_step", {"what": kind})
    if what < 0.98:
        return Step(after, "life_step", {"what": "down", "seconds": random.choice((1.0, 30.0))})
    return Step(after, "publish", _events(random))


def _fault(random: Random, kind: FaultKind) -> dict[str, Any]:
    how: dict[str, Any] = {
        "kind": kind,
        "on": "fetch" if kind in FETCH_ONLY else random.choice(("discovery", "fetch", "both")),
        "share": random.choice((0.2, 0.5, 1.0)),
        "seconds": random.choice((0.1, 2.0, 2.0, 10.0, 10.0, 100.0)),
    }
    if how["on"] == "fetch" and random.random() < 0.4:
        how["parity"] = random.randrange(2)
    if kind == "lag":
        how["behind"] = random.choice((0.5, 3.0, 10.0))
    return how


def _with_options(
    random: Random, settings: Settings, steps: list[Step]
) -> tuple[Settings, list[Step]]:
    """Add a rare option of the consumer to a history, and set its clock now and then."""
    option = random.random()
    if settings.start == "first" and option < 0.08:
        settings = replace(settings, ordered=False)
    elif settings.start == "first" and settings.partitions > 1 and option < 0.18:
        settings, steps = _chosen(random, settings, steps)
    elif settings.dialect != "v1" and option < 0.28:
        steps = _with_forgotten_edges(random, steps)
    if random.random() < 0.25:
        for _ in range(random.randint(1, 3)):
            seconds = random.choice((-1, 1)) * random.choice((30.0, 3600.0, 1e6))
            step = Step(round(2 * random.random(), 3), "set_clock", {"seconds": seconds})
            steps.insert(random.randint(1, len(steps)), step)
    return settings, steps


def _with_batches_and_grace(
    random: Random, settings: Settings, steps: list[Step]
) -> tuple[Settings, list[Step]]:
    """Let batches have a size; stop with a grace period."""
    if random.random() < 0.15:
        settings = replace(settings, batch_events=random.choice((1, 7, 1000)))
    if random.random() < 0.15:
        for _ in range(random.randint(1, 3)):
            how = {"what": "stop-in-time", "seconds": random.choice((0.0, 0.05, 0.5, 3.0))}
            step = Step(round(2 * random.random(), 3), "life_step", how)
            steps.insert(random.randint(1, len(steps)), step)
    return settings, steps


def _with_manners(
    random: Random, settings: Settings, steps: list[Step]
) -> tuple[Settings, list[Step]]:
    """Let the publisher be unkind, in half of the histories."""
    if random.random() < 0.5:
        return settings, steps
    from_the_end = settings.start == "last"
    manners = drawn(
        random, dialect=settings.dialect, from_the_end=from_the_end, streams=settings.stream
    )
    if random.random() < 0.6:
        settings = replace(settings, last_cursor=False)
    if manners.zero_edges:
        steps = [
            replace(step, how={**step.how, "dialect": "v2-token"}) if step.do == "deploy" else step
            for step in steps
        ]
    if random.random() < 0.25:
        how = {"which": random.randrange(4), "seconds": random.choice((0.5, 3.0, 20.0))}
        steps.insert(random.randint(1, len(steps)), Step(random.random(), "roll_back", how))
    if not settings.last_cursor and settings.dialect != "v1" and random.random() < 0.3:
        steps += _false_end(random)
    return replace(settings, manners=manners), steps


def _false_end(random: Random) -> list[Step]:
    """Split a partition, and let its end look for long as if it were where it is not."""
    kind: FaultKind = random.choice(("lag", "silent", "maintenance", "discovery", "html"))
    how = {"kind": kind, "on": "fetch", "share": 1.0, "seconds": random.choice((8.0, 15.0, 40.0))}
    if kind == "lag":
        how["behind"] = 60.0
    split = {"which": random.randrange(8), "parts": 2, "method": "starts-after"}
    return [
        Step(0.5, "publish", _events(random)),
        Step(random.choice((0.0, 2.0)), "fault", how),
        Step(0.0, "split", split),
        Step(random.choice((0.0, 12.0, 30.0)), "publish", _events(random)),
    ]


def _with_incidents(
    random: Random, settings: Settings, steps: list[Step]
) -> tuple[Settings, list[Step]]:
    """Read to the end again and again, or let the database and its operators do something."""
    if random.random() < 0.12:
        settings = replace(settings, follow=False)
    if random.random() < 0.15:
        steps.insert(random.randint(1, len(steps)), Step(random.random(), "rest", {"seconds": 5.0}))
        split = {"which": random.randrange(8), "parts": 2, "method": random.choice(_METHODS)}
        where = next(place for place, step in enumerate(steps) if step.do == "rest")
        steps.insert(where + 1, Step(0.5, "split", split))
    if random.random() < 0.12:
        for _ in range(random.randint(1, 2)):
            step = Step(random.random(), "fail_over", {"lost": random.choice((1, 2, 5, 15))})
            steps.insert(random.randint(1, len(steps)), step)
    plain = settings.transactional and not settings.selected and settings.start == "first"
    if plain and random.random() < 0.15:
        for _ in range(random.randint(1, 3)):
            order = random.choice(("rewind", "rewind", "skip", "drain"))
            how = {"order": order, "which": random.randrange(40)}
            steps.insert(random.randint(1, len(steps)), Step(random.random(), "operate", how))
    return settings, steps


def _chosen(random: Random, settings: Settings, steps: list[Step]) -> tuple[Settings, list[Step]]:
    """Read some of the partitions only. Later also those that came from them meanwhile.

    A partition that was merged of one that is read and one that isn't has no meaning then.
    """
    steps = [step for step in steps if step.do != "merge"]
    for _ in range(random.randint(0, 2)):
        steps.insert(random.randint(1, len(steps)), Step(random.random(), "choose_descendants"))
    return replace(settings, chosen=random.randint(1, settings.partitions - 1)), steps


def _with_forgotten_edges(random: Random, steps: list[Step]) -> list[Step]:
    """Split partitions while the consumer is down. It knows by `lineage` only where they began.

    Everything is left out in which an answer could lack a partition that `lineage` names: that is
    an error on entry, as it should be. So is a second process, which is not stopped.
    """
    steps = [step for step in steps if not _hides_partitions(step)]
    for _ in range(random.randint(1, 2)):
        how = {"which": random.randrange(8), "parts": random.randint(1, 3)}
        step = Step(round(2 * random.random(), 3), "split_unnamed", {**how, "seconds": 1.0})
        steps.insert(random.randint(1, len(steps)), step)
    return steps


def _hides_partitions(step: Step) -> bool:
    return step.do in ("deploy", "second", "merge") or step.how.get("kind") == "lag"
