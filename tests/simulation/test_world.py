"""What the simulated world can do, and that generated histories do it."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest

from feedapi_client.protocol.negotiation import negotiate
from feedapi_client.runtime import trouble
from feedapi_client.runtime.partition import RuntimePartition
from tests.simulation import wire
from tests.simulation.backends import BACKENDS
from tests.simulation.named import named
from tests.simulation.process import Process
from tests.simulation.scenario import Scenario, Settings, Step, generate
from tests.simulation.simulation import SimulationOutcome, run
from tests.simulation.wall import START, WallClock
from tests.simulation.world import World


class Time:
    now = 0.0


def world(partitions: int = 1, **options: Any) -> tuple[World, Time]:
    time = Time()
    made = World(partitions, "v2-token", last_cursor=True, now=lambda: time.now, **options)
    for entity in range(4):
        made.publish(entity)
    return made, time


def history(
    settings: Settings, *steps: Step, seed: str = "1", backend: Any = "asyncio"
) -> SimulationOutcome:
    publish = Step(0.0, "publish", {"count": 24, "entities": 4})
    return run(Scenario(seed, settings, (publish, *steps), backend))


def test_generated_histories_have_every_step_and_every_fault() -> None:
    found: Counter[str] = Counter()
    for seed in range(1500):
        scenario = generate(seed)
        found.update({step.do for step in scenario.steps})
        found.update({str(step.how.get("kind") or step.how.get("what")) for step in scenario.steps})
    expected = (
        "publish split merge deploy second store_fails store_stalls 500 503 429 404 409 html "
        "connect stall slow torn error-text reset 204 silent stall-body lag kill cancel "
        "cancel-natively stop stop-in-time leave reenter pause down set_clock split_unnamed "
        "choose_descendants"
    )
    assert set(expected.split()) <= found.keys()


def test_generated_settings_differ_from_the_plainest_in_every_field() -> None:
    plain = Settings()
    settings = [generate(seed).settings for seed in range(300)]
    never = {
        name
        for name in Settings.__dataclass_fields__
        if all(getattr(one, name) == getattr(plain, name) for one in settings)
    }
    impossible = {"whole_lineage", "careless"}  # nobody can read such histories exactly once
    of_instances = {"instances", "mixed", "lock_seconds", "handover", "lease", "rebalance"}
    by_key = {"in_flight", "hangs"}
    assert never == impossible | of_instances | by_key


# ---------------------------------------------------------------------- the publisher


def test_a_merged_partition_has_the_history_of_both_and_their_cursors() -> None:
    made, _ = world()
    first, second = made.split(0, 2, "cursor-from")
    merged = made.partitions[made.merge(first, second)]
    assert [event.sequence for event in merged.events] == [1, 2, 3, 4]
    assert merged.cursor_from == (first, second, 0)
    assert [p.id for p in made.writable()] == [merged.id]


def test_the_end_of_an_open_partition_moves_on_with_the_feed() -> None:
    made, time = world(2, moving_cursors=True)
    still, _ = made.writable()
    time.now = 1.0
    made.publish(1)
    assert [made.end(still, at) for at in (0.0, 1.0)] == [4, 5]
    assert made.end(still, 1.0) > still.end(1.0)


def test_a_noisy_publisher_is_understood() -> None:
    made, _ = world(noisy=True)
    (child,) = made.split(0, 1, "starts-after")
    found = negotiate(200, wire.discovery(made, made.versions[0][1], 0.0, stream=False), feed="f")
    assert found.partitions[child].starts_after == 0
    style = wire.PageStyle()
    pages = [
        wire.page(made, made.partitions[0], 0, 0.0, "v2-token", style, Random(seed)).lines
        for seed in range(20)
    ]
    assert any(b"unknown" in line for lines in pages for line in lines)


# ---------------------------------------------------------------------- the application


@pytest.mark.parametrize("backend", BACKENDS)
def test_r17_a_second_process_fences_the_first_and_nothing_is_done_twice(backend: Any) -> None:
    settings = Settings(page_size=2, batch_bytes=1, handling=0.3)
    outcome = history(settings, Step(0.5, "second", {"seconds": 60.0}), backend=backend)
    assert outcome.failure is None, outcome.text
    assert any("the process ends with FencedError" in line for line in outcome.trace)
    assert outcome.effects == outcome.published


@pytest.mark.parametrize("how", [{}, {"on_error": "park"}, {"on_error": "park", "follow": False}])
def test_r09_a_merge_of_ancestors_at_different_cursors_ends_the_history(how: Any) -> None:
    steps = (
        Step(1.0, "split", {"which": 0, "parts": 2, "method": "cursor-from"}),
        Step(1.0, "publish", {"count": 40, "entities": 2}),
        Step(0.0, "merge", {"which": 0}),
    )
    outcome = history(Settings(handling=0.3, page_size=2, batch_bytes=1, **how), *steps)
    assert outcome.failure is None, outcome.text
    assert how or any("AmbiguousLineageError" in line for line in outcome.trace)
    assert outcome.effects < outcome.published


def test_r09_a_merge_of_ancestors_at_the_same_cursor_is_read_on() -> None:
    steps = (
        Step(1.0, "split", {"which": 0, "parts": 2, "method": "cursor-from"}),
        Step(20.0, "merge", {"which": 0}),
        Step(1.0, "publish", {"count": 4, "entities": 4}),
    )
    outcome = history(Settings(moving_cursors=True), *steps)
    assert outcome.failure is None, outcome.text
    assert outcome.effects == outcome.published == 28


@pytest.mark.parametrize("backend", BACKENDS)
def test_events_that_nobody_can_handle_are_quarantined_once(backend: Any) -> None:
    settings = Settings(way="run", on_failure="quarantine", poison=True, flaky=0.1)
    outcome = history(settings, Step(0.0, "publish", {"count": 80, "entities": 8}), backend=backend)
    assert outcome.failure is None, outcome.text
    assert outcome.effects == outcome.published == 104


@pytest.mark.slow
def test_batches_committed_late_are_dropped_when_their_partition_was_split() -> None:
    settings = Settings(page_size=2, batch_bytes=1, commit_every=5)
    outcomes = [
        history(
            settings,
            Step(0.2, "split", {"which": 0, "parts": 2, "method": "cursor-from"}),
            Step(0.0, "publish", {"count": 24, "entities": 4}),
            Step(0.0, "deploy", {"dialect": "v2-token", "seconds": 0.0}),
            seed=str(seed),
        )
        for seed in range(10)
    ]
    assert [outcome.failure for outcome in outcomes] == [None] * 10
    assert any("was too late" in line for outcome in outcomes for line in outcome.trace)


def test_r05_a_commit_that_was_rolled_back_is_made_again() -> None:
    outcome = history(
        Settings(rollbacks=0.5, page_size=2, batch_bytes=1),
        *[Step(5.0, "publish", {"count": 1, "entities": 1})],
    )
    assert outcome.failure is None, outcome.text


def test_r17_an_application_that_forgets_a_rollback_fences_itself_and_loses_nothing() -> None:
    settings = Settings(rollbacks=0.5, careless=True, page_size=2, batch_bytes=1)
    outcome = history(settings, Step(5.0, "publish", {"count": 1, "entities": 1}))
    assert outcome.failure is None, outcome.text
    assert any("FencedError" in line for line in outcome.trace)


@pytest.mark.parametrize("what", ["leave", "reenter", "stop", "kill", "cancel", "cancel-natively"])
def test_a_life_goes_on_after(what: str) -> None:
    steps = (
        Step(0.3, "life_step", {"what": what}),
        Step(0.2, "publish", {"count": 4, "entities": 4}),
    )
    outcome = history(Settings(page_size=2, handling=0.1), *steps)
    assert outcome.failure is None, outcome.text
    assert outcome.effects == outcome.published


# ---------------------------------------------------------------------- options of the consumer


@pytest.mark.parametrize("backend", BACKENDS)
def test_r08_an_edge_that_discovery_leaves_out_is_given_by_lineage(backend: Any) -> None:
    steps = (
        Step(1.0, "split_unnamed", {"which": 0, "parts": 2, "seconds": 1.0}),
        Step(0.0, "publish", {"count": 12, "entities": 4}),
    )
    outcome = history(Settings(page_size=2, handling=0.1), *steps, backend=backend)
    assert outcome.failure is None, outcome.text
    assert outcome.effects == outcome.published == 36


def test_a_process_that_fails_while_it_is_cancelled_is_judged() -> None:
    settings = Settings(
        partitions=4, way="run", transactional=False, store_latency=0.2, start="last"
    )
    steps = (
        Step(0.0, "second", {"seconds": 20.0}),
        Step(0.433, "second", {"seconds": 3.0}),
        Step(0.0, "split", {"which": 6, "parts": 1, "method": "starts-after"}),
        Step(0.0, "publish", {"count": 1, "entities": 1}),
        Step(0.434, "life_step", {"what": "cancel"}),
    )
    outcome = run(Scenario("14067685", settings, steps))
    assert outcome.failure is None, outcome.text
    assert any("ends with FencedError" in line for line in outcome.trace)


def test_r05_what_was_rolled_back_is_committed_again_before_more_is_asked_for() -> None:
    settings = Settings(
        partitions=4, latency=0.005, reply_latency=0.004, stubborn=True, commit_every=5
    )
    steps = (
        Step(0.0, "store_fails", {"share": 0.1, "seconds": 0.1}),
        Step(0.0, "publish", {"count": 1, "entities": 1}),
        Step(0.629, "publish", {"count": 1, "entities": 12}),
    )
    outcome = run(Scenario("12083019", settings, steps))
    assert outcome.failure is None, outcome.text
    assert any("the application iterates on" in line for line in outcome.trace)


def test_r11_a_deployment_that_takes_longer_than_refused_for_may_end_a_consumer() -> None:
    settings = Settings(partitions=4, dialect="v1", refused_for=0.5, follow=False, rollbacks=0.3)
    steps = (
        Step(0.0, "publish", {"count": 30, "entities": 12}),
        Step(0.324, "deploy", {"dialect": "v2-draft", "seconds": 10}),
        Step(0.0, "split", {"which": 2, "parts": 3, "method": "cursor-from"}),
        Step(1.035, "publish", {"count": 32, "entities": 1}),
        Step(9.0, "deploy", {"dialect": "v2-draft", "seconds": 0}),
    )
    outcome = run(Scenario("0", settings, steps))
    assert outcome.failure is None, outcome.text
    assert any("ends with LineageError" in line for line in outcome.trace)


def test_chosen_partitions_are_read_and_others_only_once_they_are_chosen_too() -> None:
    steps = (
        Step(1.0, "split", {"which": 0, "parts": 2, "method": "starts-after"}),
        Step(0.0, "publish", {"count": 24, "entities": 4}),
        Step(30.0, "publish", {"count": 4, "entities": 4}),
    )
    settings = Settings(partitions=2, chosen=1)
    outcome = history(settings, *steps)
    assert outcome.failure is None, outcome.text
    assert (outcome.effects, outcome.published) == (12, 52)
    outcome = history(settings, *steps[:2], Step(5.0, "choose_descendants"), *steps[2:])
    assert outcome.failure is None, outcome.text
    assert outcome.effects == 26


def test_r09_a_successor_that_is_chosen_later_goes_on_where_its_ancestor_stopped() -> None:
    steps = (
        Step(1.0, "split", {"which": 0, "parts": 2, "method": "cursor-from"}),
        Step(0.0, "publish", {"count": 24, "entities": 4}),
        Step(5.0, "choose_descendants"),
    )
    outcome = history(Settings(partitions=2, chosen=1, page_size=2, handling=0.3), *steps)
    assert outcome.failure is None, outcome.text
    assert outcome.effects == 24


def test_a_partition_that_is_gone_before_it_was_chosen_is_an_error() -> None:
    steps = (
        Step(0.0, "split", {"which": 0, "parts": 2, "method": "cursor-from"}),
        Step(1.0, "publish", {"count": 4, "entities": 4}),
    )
    outcome = history(Settings(partitions=2, chosen=1), *steps)
    assert outcome.failure is None, outcome.text
    assert any("the feed does not list" in line for line in outcome.trace)
    assert outcome.effects == 0


def test_the_clock_of_the_consumer_is_set_and_put_back() -> None:
    shown: list[datetime] = []
    wall = WallClock(lambda: 5.0)
    with wall.shown():
        for wall.off_by in (0.0, -3600.0):
            shown.append(trouble.datetime.now(UTC))
    assert [moment.timestamp() for moment in shown] == [START + 5.0, START + 5.0 - 3600.0]
    assert trouble.datetime is datetime


# ---------------------------------------------------------------------- leaks and idling


def test_a_task_that_outlives_its_process_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    consume = Process._consume
    tasks: list[object] = []

    async def leaking(self: Process, consumer: Any) -> None:
        tasks.append(asyncio.ensure_future(asyncio.sleep(3600.0)))
        await consume(self, consumer)

    monkeypatch.setattr(Process, "_consume", leaking)
    assert history(Settings()).failure == "leak"


def test_a_consumer_that_polls_too_often_at_the_end_of_a_feed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RuntimePartition, "polled", lambda *_: None)
    assert history(Settings()).failure == "idle"


def test_named_histories_are_the_same_each_time() -> None:
    name = "streams_that_are_always_due"
    assert run(named(name, 1)).digest == run(named(name, 1)).digest
