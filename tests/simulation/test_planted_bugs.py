"""Each rule of the oracle is violated by a bug that is planted for it."""

from __future__ import annotations

from typing import Any

import pytest

from feedapi_client.model import FeedKey, Position
from feedapi_client.status import ConsumerStatus, PartitionState, PartitionStatus
from tests.simulation import planted
from tests.simulation.backends import BACKENDS
from tests.simulation.keyed import Keys
from tests.simulation.knowledge import Knowledge
from tests.simulation.many import Histories
from tests.simulation.oracle import Oracle
from tests.simulation.scenario import generate
from tests.simulation.simulation import run
from tests.simulation.store import Effect
from tests.simulation.transport import Fetched, SimulatedTransport
from tests.simulation.world import World


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_planted_bug_nothing_is_found(backend: Any) -> None:
    for seed in range(25):
        outcome = run(generate(seed, backend))
        assert outcome.failure is None, f"{planted.command(seed, backend)}\n{outcome.text}"


# ---------------------------------------------------------------------- rule by rule


class Time:
    now = 0.0


def oracle(*, transactional: bool = True, ordered: bool = True) -> tuple[Oracle, World, Time]:
    time = Time()
    world = World(1, "v2-token", last_cursor=True, now=lambda: time.now)
    for _ in range(3):
        world.publish(0)
    return Oracle(world, transactional=transactional, ordered=ordered), world, time


def rules(checked: Oracle) -> list[str]:
    return [violation.rule for violation in checked.violations]


def effects(checked: Oracle, *numbers: int) -> list[str]:
    for n in numbers:
        checked.effect(Effect(0, n, 0))
    return rules(checked)


def test_events_in_order_and_once_violate_nothing() -> None:
    checked, *_ = oracle()
    assert effects(checked, 1, 2, 3) == []
    assert checked.complete()


def test_an_effect_that_comes_twice_violates_exactly_once() -> None:
    checked, *_ = oracle()
    assert effects(checked, 1, 1) == ["exactly-once"]


def test_an_event_that_is_left_out_violates_the_order() -> None:
    checked, *_ = oracle()
    assert effects(checked, 1, 3) == ["order"]


def test_a_new_iteration_without_transactions_may_read_again() -> None:
    checked, *_ = oracle(transactional=False)
    effects(checked, 1, 2)
    checked.began()
    assert effects(checked, 1, 2, 3) == []


def test_one_iteration_without_transactions_may_not_read_again() -> None:
    checked, *_ = oracle(transactional=False)
    assert effects(checked, 1, 2, 1) == ["exactly-once"]


def test_a_new_iteration_may_not_leave_out_events() -> None:
    checked, *_ = oracle(transactional=False)
    effects(checked, 1)
    checked.began()
    assert effects(checked, 3) == ["order"]


def test_without_order_only_the_events_of_one_family_keep_theirs() -> None:
    checked, world, _ = oracle(ordered=False)
    (child,) = world.split(0, 1, "starts-after")
    for _ in range(2):
        world.publish(0)
    for n in (4, 1, 5, 2):
        checked.effect(Effect(0, n, child))
    checked.delivered(child, {})
    assert rules(checked) == []
    assert not checked.complete()
    assert effects(checked, 3) == []
    assert checked.complete()
    assert effects(checked, 4) == ["exactly-once"]


def test_an_effect_of_a_partition_that_is_not_to_be_read_is_found() -> None:
    checked, _, _ = oracle()
    checked.chosen = {1}
    assert effects(checked, 1) == ["partitions"]


def test_a_child_before_its_parent_is_found() -> None:
    checked, world, _ = oracle()
    (child,) = world.split(0, 1, "starts-after")
    checked.delivered(child, {0: Position("f0-3")})
    assert rules(checked) == ["parent-first"]
    checked.delivered(child, {0: Position("f0-4", "drained")})
    assert len(checked.violations) == 1


def test_a_child_of_a_parent_that_another_process_has_come_to_again_is_right() -> None:
    checked, world, _ = oracle()
    (child,) = world.split(0, 1, "starts-after")
    stored = {0: Position("f0-3")}
    checked.delivered(child, stored, loaded={0: Position("f0-3", "drained")})
    assert rules(checked) == []
    checked.delivered(child, stored, loaded={0: Position("f0-2")})
    assert rules(checked) == ["parent-first"]


def test_a_save_of_a_partition_that_was_given_away_is_found() -> None:
    found: list[str] = []
    knowledge = Knowledge(lambda rule, _: found.append(rule), lambda: 10.0)
    knowledge.claimed("process 1", {0: 1}, asked=knowledge.moment)
    knowledge.loads()
    knowledge.released([0])
    stored = Position("f0-2")
    knowledge.saves({0: stored}, {0: stored})  # again: the reply to it was lost
    assert found == []
    knowledge.saves({0: stored.advance("f0-3")}, {0: stored})
    assert found == ["lease"]


def test_a_status_that_shows_an_unread_partition_as_caught_up_is_found() -> None:
    checked, *_ = oracle()
    checked.fetched(Fetched(0, 0, 3))
    checked.fetched(Fetched(0, 0, 3))
    found = PartitionStatus(0, PartitionState.CAUGHT_UP, "f0-2", caught_up=True)
    checked.status(ConsumerStatus("feed", partitions={0: found}), {0: Position("f0-2")}, 1)
    assert rules(checked) == ["status"]


@pytest.mark.parametrize("state", [PartitionState.DRAINED, PartitionState.SUPERSEDED])
def test_a_status_that_shows_an_open_partition_as_done_is_found(state: PartitionState) -> None:
    checked, *_ = oracle()
    found = PartitionStatus(0, state, "f0-3")
    checked.status(ConsumerStatus("feed", partitions={0: found}), {0: Position("f0-3")}, 1)
    assert rules(checked) == ["status"]


def test_a_buffer_over_its_limit_is_found() -> None:
    checked, *_ = oracle()
    checked.status(ConsumerStatus("feed", buffered_bytes=11), {}, 10)
    assert rules(checked) == ["buffer"]


def test_a_response_that_is_never_closed_is_found() -> None:
    checked, *_ = oracle()
    transport = SimulatedTransport(None)  # type: ignore[arg-type]
    transport.open = 1
    checked.traffic(transport)
    assert rules(checked) == ["leak"]


@pytest.mark.parametrize(("pause", "found"), [(0.01, ["busy"]), (0.1, [])])
def test_the_same_request_again_and_again_is_found(pause: float, found: list[str]) -> None:
    checked, *_ = oracle()
    transport = SimulatedTransport(None)  # type: ignore[arg-type]
    for n in range(60):
        transport.count("cursor=a", n * pause)
    checked.traffic(transport)
    assert rules(checked) == found


def test_an_end_with_unread_events_is_found() -> None:
    checked, *_ = oracle()
    database = type("Stored", (), {"positions": {}})()
    checked.finished(database, FeedKey("http://feed/"), ["partition 1 asked at f0-3"])
    assert rules(checked) == ["cursor", "progress"]


@pytest.mark.slow
@pytest.mark.parametrize("instances", [(), (2, 3)])
def test_without_a_planted_bug_nothing_is_found_by_key(instances: tuple[int, ...]) -> None:
    histories = Histories(instances=instances, by_key=True)
    for seed in range(12):
        outcome = run(histories.of(seed))
        assert outcome.failure is None, f"seed {seed} of {histories}\n{outcome.text}"


def test_a_cursor_that_passes_an_event_which_is_not_done_is_found() -> None:
    checked, *_ = oracle()
    effects(checked, 1)
    checked.passing({0: Position("f0-1", revision=2)}, {0: Position("_first")})
    assert rules(checked) == []
    checked.passing({0: Position("f0-2", revision=2)}, {0: Position("_first")})
    assert rules(checked) == ["passed"]


def test_two_events_of_a_key_at_once_are_found() -> None:
    found: list[str] = []
    keys = Keys(lambda rule, text: found.append(rule), lambda: 0.0)
    keys.begin(1, 0)
    keys.begin(2, 0)
    keys.end(1)
    keys.begin(1, 0)
    assert found == []
    keys.begin(2, 0)
    assert found == ["one at a time"]
