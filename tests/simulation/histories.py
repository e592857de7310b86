"""Histories that show one bug each, where the usual ones seldom do. A seed draws their times."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.simulation.manners import Manners
from tests.simulation.scenario import LEASE_SECONDS, Scenario, Settings, Step


def chain_of_transfers(seed: int) -> Scenario:
    """Split after split by cursor transfer, with a store that fails in between."""
    steps = [publish(20, 4)]
    for _ in range(4):
        steps += [
            Step(0.5, "store_fails", {"share": 0.6, "seconds": 2.0}),
            split("cursor-from", after=0.3),
            deploy(),
            publish(8, 4, after=2.0),
        ]
    return scenario(seed, Settings(partitions=2, store_latency=0.05), steps)


def listed_again(seed: int) -> Scenario:
    """Discoveries of a replica that lags leave out partitions, which are then listed again."""
    steps = [publish(200, 6), split("cursor-from", after=1.0), deploy()]
    steps += [fault("slow", "fetch", share=0.3, seconds=5.0, after=0.5)]
    steps += [fault("lag", "discovery", share=0.5, seconds=4.0, behind=4.0, after=0.3)]
    steps += [deploy(after=0.4) for _ in range(8)]
    settings = Settings(handling=0.3, batch_bytes=1, page_size=16, checkpoint_every=2)
    return scenario(seed, settings, steps)


def lag_between_two_splits(seed: int) -> Scenario:
    """A replica shows the time between two splits, of which the consumer has seen neither."""
    steps = [
        publish(20, 4),
        Step(2.0, "life_step", {"what": "down", "seconds": 3.0}),
        split("cursor-from"),
        publish(12, 4, after=0.5),
        split("cursor-from", after=1.5),
        fault("lag", "both", share=0.6, seconds=20.0, behind=3.0, after=1.0),
    ]
    for _ in range(6):
        steps += [deploy(after=0.3), publish(4, 4)]
    return scenario(seed, Settings(), steps)


def last_batch_of_a_parent(seed: int) -> Scenario:
    """A parent is read to its end while its last batch is still handled."""
    steps = [publish(8, 4), split("starts-after"), publish(20, 4)]
    return scenario(seed, Settings(way="run", handling=2.0), steps)


def first_starts_at_once(seed: int) -> Scenario:
    """Several instances start at once, with a slow store: one of them saves the first positions."""
    settings = Settings(partitions=3, instances=4, store_latency=1.0)
    return scenario(seed, settings, [publish(8, 4), publish(8, 4, after=3.0)])


def orderly_hand_overs(seed: int) -> Scenario:
    """Instances come and go as they should, and nothing fails: no event is handled twice."""
    random = Random(f"orderly {seed}")
    steps, instances = [publish(20, 6)], random.choice((2, 3))
    for _ in range(6):
        how = {"what": "stop", "which": random.randrange(instances)}
        steps.append(Step(random.uniform(0.5, 4.0), "life_step", how))
        if random.random() < 0.6:
            method = random.choice(("starts-after", "cursor-from", "cursor-from"))
            split_how = {"which": random.randrange(8), "parts": 2, "method": method}
            steps.append(Step(random.uniform(0.0, 1.0), "split", split_how))
        steps.append(publish(random.randint(5, 20), 6, after=random.uniform(0.0, 0.5)))
    settings = Settings(
        partitions=random.choice((2, 3, 5)),
        instances=instances,
        transactional=False,
        handling=random.choice((0.05, 0.5)),
        batch_bytes=random.choice((1, 1000)),
        page_size=5,
        store_latency=random.choice((0.01, 0.3)),
        reply_latency=random.choice((0.0, 0.3)),
    )
    return scenario(seed, settings, steps)


def hand_overs(seed: int) -> Scenario:
    """Instances come and go all the time, with a slow store, while partitions are split."""
    random = Random(f"hand-overs {seed}")
    steps, instances = [publish(20, 6)], random.choice((2, 3))
    for _ in range(8):
        what = random.choice(("stop", "stop", "kill", "leave", "down", "freeze"))
        seconds = {"down": 1.0, "freeze": random.choice((3.0, 13.0))}.get(what, 0.0)
        how = {"what": what, "seconds": seconds, "which": random.randrange(instances)}
        steps.append(Step(random.uniform(0.0, 3.0), "life_step", how))
        if random.random() < 0.5:
            method = random.choice(("starts-after", "cursor-from"))
            split_how = {"which": random.randrange(8), "parts": 2, "method": method}
            steps.append(Step(random.uniform(0.0, 1.0), "split", split_how))
        if random.random() < 0.3:
            steps.append(fault("404", "fetch", share=0.5, seconds=3.0))
        steps.append(publish(random.randint(1, 20), 6, after=random.uniform(0.0, 0.5)))
    settings = Settings(
        partitions=random.choice((1, 3, 5)),
        instances=instances,
        way=random.choice(("batches", "run")),
        handling=random.choice((0.05, 0.5)),
        batch_bytes=random.choice((1, 1000)),
        page_size=5,
        store_latency=random.choice((0.01, 0.3)),
        reply_latency=random.choice((0.0, 0.3)),
        follow=random.random() < 0.6,
    )
    return scenario(seed, settings, steps)


def frozen_before_a_commit(seed: int) -> Scenario:
    """Instances are frozen while transactions of their events are open, and their leases expire."""
    steps = [publish(200, 12)]
    for which in (0, 1, 0, 1):
        how = {"what": "freeze", "seconds": 2 * LEASE_SECONDS, "which": which}
        steps += [publish(100, 12), Step(3 * LEASE_SECONDS, "life_step", how)]
    settings = Settings(partitions=2, instances=2, way="keys", store_latency=0.2)
    return scenario(seed, settings, steps)


def second_process_after_a_failover(seed: int) -> Scenario:
    """The last save of a consumer is lost, and a second one reads past it with its first save."""
    steps = [
        publish(4, 2),
        Step(8.0, "fail_over", {"lost": 1}),
        publish(4, 2),
        Step(0.0, "second", {"seconds": 20.0}),
    ]
    return scenario(seed, Settings(partitions=1, handling=3.0), steps)


def end_behind_a_gateway(seed: int) -> Scenario:
    """A gateway answers 200 with an object that says nothing, while a partition is at no end."""
    gateway = fault("maintenance", "fetch", share=1.0, seconds=20.0)
    steps = [publish(8, 4), gateway, publish(8, 4), split("starts-after"), publish(8, 4)]
    return scenario(seed, Settings(last_cursor=False), [*steps, publish(4, 4, after=25.0)])


def end_behind_a_long_lag(seed: int) -> Scenario:
    """A replica that lags answers for longer than it takes to believe in an end (R6)."""
    lag = fault("lag", "fetch", share=1.0, seconds=30.0, behind=60.0, after=1.0)
    steps = [publish(8, 4), lag, publish(8, 4), split("starts-after", after=0.5), deploy(after=0.5)]
    return scenario(seed, Settings(last_cursor=False), [*steps, publish(4, 4, after=60.0)])


def end_behind_a_silent_gateway(seed: int) -> Scenario:
    """Each run is short, and one of them is answered by a gateway for all its time (R6)."""
    silent = fault("silent", "fetch", share=1.0, seconds=40.0)
    steps = [publish(8, 4), publish(8, 4, after=2.0), silent, split("starts-after")]
    settings = Settings(last_cursor=False, follow=False)
    return scenario(seed, settings, [*steps, publish(4, 4, after=60.0)])


def older_ends(seed: int) -> Scenario:
    """A replica that lags names its own end, which the consumer has passed long ago (R13)."""
    steps = []
    for _ in range(10):
        steps += [publish(6, 3, after=0.3)]
    steps += [fault("lag", "fetch", share=0.5, seconds=20.0, behind=2.0)]
    for _ in range(10):
        steps += [publish(6, 3, after=0.3)]
    settings = Settings(page_size=2, checkpoint_every=1, manners=Manners(ahead="tail"))
    return scenario(seed, settings, steps)


def rolled_back_while_down(seed: int) -> Scenario:
    """A publisher takes back a split by cursor transfer, and the consumer starts anew meanwhile."""
    steps = [publish(20, 4), split("cursor-from", after=1.0), deploy(), publish(8, 4, after=1.0)]
    steps += [
        Step(2.0, "roll_back", {"which": 0, "seconds": 20.0}),
        Step(1.0, "life_step", {"what": "down", "seconds": 2.0}),
        publish(8, 4, after=25.0),
    ]
    return scenario(seed, Settings(), steps)


def slow_answers_around_a_close(seed: int) -> Scenario:
    """An empty answer is on its way while its partition gets events, is closed and discovered."""
    steps = [publish(8, 4), fault("slow", "fetch", share=0.8, seconds=20.0, after=1.0)]
    for _ in range(4):
        steps += [publish(4, 4, after=1.0), split("starts-after"), deploy(), publish(4, 4)]
    return scenario(seed, Settings(partitions=3, last_cursor=False), steps)


def one_answer_without_a_line(seed: int) -> Scenario:
    """For a moment, shorter than the pause before the next request, answers hold nothing."""
    steps = [publish(200, 4), split("starts-after"), publish(20, 4)]
    steps += [fault("204", "fetch", share=1.0, seconds=0.15, after=1.2) for _ in range(6)]
    settings = Settings(last_cursor=False, page_size=5, handling=0.3, batch_bytes=1)
    return scenario(seed, settings, steps)


def small_buffer(seed: int) -> Scenario:
    """More comes than fits into the buffer, for an application that is slow."""
    settings = Settings(
        partitions=8,
        padding=5_000,
        page_size=20,
        handling=0.3,
        batch_bytes=20_000,
        buffer_bytes=200_000,
        checkpoint_every=2,
    )
    return scenario(seed, settings, [publish(160, 16), publish(160, 16, after=2.0)])


def started_at_the_end(seed: int) -> Scenario:
    """A consumer begins behind the last event, and partitions appear later."""
    steps = [publish(10, 4), publish(10, 4, after=5.0)]
    for _ in range(3):
        steps += [split("starts-after", after=1.0), publish(10, 4), deploy(), publish(10, 4)]
    return scenario(seed, Settings(start="last", partitions=2), steps)


def started_at_the_end_before_anything_is_listed(seed: int) -> Scenario:
    """Nothing is listed when a consumer begins that is to begin behind the last event."""
    manners = Manners(unlisted=90.0, null=seed % 2 == 0)
    steps = [publish(10, 4), publish(10, 4, after=100.0)]
    return scenario(seed, Settings(start="last", partitions=2, manners=manners), steps)


def limited_feed(seed: int) -> Scenario:
    """More partitions than requests a second are let pass, for minutes."""
    manners = Manners(rate=2.0, rate_status=(429, 503)[seed % 2])
    steps = [publish(60, 12), publish(30, 12, after=100.0)]
    return scenario(seed, Settings(partitions=12, manners=manners), steps)


def new_token(seed: int) -> Scenario:
    """The publisher changes its token, and nothing else happens."""
    return scenario(
        seed, Settings(partitions=2), [publish(20, 4), deploy(after=3.0), publish(4, 4)]
    )


def children_that_are_listed_late(seed: int) -> Scenario:
    """A split whose children are listed only some seconds after their parent was closed."""
    steps = [publish(120, 3), split("starts-after", after=1.0, listed_after=1.0), deploy()]
    settings = Settings(handling=1.0, batch_bytes=1, page_size=6, checkpoint_every=2)
    return scenario(seed, settings, [*steps, publish(6, 3)])


def events_on_an_open_stream(seed: int) -> Scenario:
    """Events come one by one on a response that stays open."""
    settings = Settings(partitions=1, stream=True, handling=0.0)
    return scenario(seed, settings, [publish(1, 1, after=0.3) for _ in range(4)])


def left_while_the_store_is_slow(seed: int) -> Scenario:
    """A consumer is left and entered again while splits are saved."""
    steps = [publish(20, 4)]
    for _ in range(5):
        steps += [publish(30, 4, after=1.0), split("cursor-from", after=0.5), deploy()]
        steps += [Step(0.5, "life_step", {"what": "leave"}) for _ in range(3)]
    settings = Settings(partitions=2, store_latency=0.4, handling=0.2, batch_bytes=1)
    return scenario(seed, settings, steps)


def commits_that_fail(seed: int) -> Scenario:
    """The store fails, and an application that iterates over events goes on after the error."""
    steps = [publish(60, 4)]
    steps += [Step(0.5, "store_fails", {"share": 0.3, "seconds": 1.0}) for _ in range(3)]
    settings = Settings(way="events", transactional=False, stubborn=True, page_size=2, handling=0.1)
    return scenario(seed, settings, [*steps, publish(20, 4)])


def commits_that_are_cancelled(seed: int) -> Scenario:
    """Commits that take about as long as the application waits for them, and take effect before
    they return (R20).
    """
    settings = Settings(
        transactional=False,
        impatience=0.6,
        store_latency=0.004,
        reply_latency=0.004,
        batch_bytes=1,
        checkpoint_every=1,
    )
    return scenario(seed, settings, [publish(200, 4)])


def child_of_a_failing_parent(seed: int) -> Scenario:
    """No fetch of the parent succeeds for long. Its child need not wait without order."""
    steps = [publish(8, 4), Step(0.0, "split", {**_ONE_CHILD, "method": "starts-after"})]
    steps += [fault("503", "fetch", share=1.0, seconds=900.0, parity=0), publish(8, 4)]
    settings = Settings(ordered=False)
    return scenario(seed, settings, [*steps, publish(4, 4, after=30.0)])


_ONE_CHILD = {"which": 0, "parts": 1}


def merge_of_a_partition_that_nobody_saw(seed: int) -> Scenario:
    """A partition is split, and a part of it merged with another one, between two discoveries.

    Where that part stands is told only by the partition that was split (R9).
    """
    steps = [
        Step(0.0, "split", {"which": 0, "parts": 3, "method": "cursor-from"}),
        Step(0.4, "split", {"which": 1, "parts": 3, "method": "starts-after"}),
        Step(0.0, "split", {"which": 1, "parts": 2, "method": "cursor-from"}),
        Step(0.3, "merge", {"which": 0}),
    ]
    return scenario(seed, Settings(latency=0.3, moving_cursors=True), steps)


def cancelled_while_it_is_left(seed: int) -> Scenario:
    """A consumer is left, to be entered again, and its process cancelled at the same time."""
    steps = [publish(20, 4)]
    for _ in range(20):
        steps += [
            publish(4, 4, after=1.0),
            Step(0.0, "life_step", {"what": "reenter"}),
            Step(0.0, "life_step", {"what": "cancel"}),
        ]
    return scenario(seed, Settings(partitions=4), steps)


def stopped_while_it_begins_again(seed: int) -> Scenario:
    """A consumer begins another iteration of a feed that is down; stopped, and cancelled too."""
    steps = [publish(20, 4)]
    for round_ in range(10):
        steps += [
            publish(4, 4, after=1.0),
            fault("503", "discovery", share=1.0, seconds=3.0),
            Step(0.0, "life_step", {"what": "leave"}),
            Step(1.0, "life_step", {"what": "stop-in-time", "seconds": 0.0}),
        ]
        if round_ % 2:
            steps.append(Step(0.0, "life_step", {"what": "cancel-natively"}))
    return scenario(seed, Settings(partitions=4), steps)


def clock_that_is_set(seed: int) -> Scenario:
    """The clock of the consumer's machine is set back while requests are refused (R10)."""
    steps = [publish(20, 4), fault("404", "fetch", share=0.5, seconds=60.0)]
    for hours in range(1, 40):
        steps += [publish(1, 4, after=0.3), Step(0.0, "set_clock", {"seconds": -3600.0 * hours})]
    return scenario(seed, Settings(partitions=3), steps)


# ---------------------------------------------------------------------- steps


def scenario(seed: int, settings: Settings, steps: list[Step]) -> Scenario:
    """Return the scenario of these steps; the seed stretches the pauses before them."""
    random = Random(f"history {seed}")
    stretched = [
        Step(round(step.after * random.uniform(0.5, 1.5), 3), step.do, step.how) for step in steps
    ]
    return Scenario(f"history {seed}", settings, tuple(stretched))


def publish(count: int, entities: int, *, after: float = 0.0) -> Step:
    return Step(after, "publish", {"count": count, "entities": entities})


def split(method: str, *, after: float = 0.0, **more: Any) -> Step:
    return Step(after, "split", {"which": 0, "parts": 2, "method": method, **more})


def deploy(*, after: float = 0.0) -> Step:
    return Step(after, "deploy", {"dialect": "v2-token", "seconds": 0.0})


def fault(
    kind: str, on: str, *, share: float, seconds: float, after: float = 0.0, **more: Any
) -> Step:
    how = {"kind": kind, "on": on, "share": share, "seconds": seconds, **more}
    return Step(after, "fault", how)


def end_beside_failures(seed: int) -> Scenario:
    """Many partitions are asked often, and a small part of their requests fails all the time."""
    steps = [publish(60, 60), split("starts-after", after=2.0), publish(60, 60)]
    settings = Settings(partitions=100, last_cursor=False, failing=0.1)
    return scenario(seed, settings, steps)
