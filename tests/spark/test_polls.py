"""When partitions are asked for news, and that an idle feed costs next to nothing (R15)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.options import Limits
from feedapi_client.runtime.discovery_timer import UNKNOWN_COMMAND_GAP_SECONDS
from feedapi_client.spark import stream
from feedapi_client.spark.feed_access import FeedConnection
from feedapi_client.spark.plan import epoch_planner as planning
from feedapi_client.spark.plan.epoch_planner import EpochPlanner
from feedapi_client.spark.plan.polls import PollSchedule
from feedapi_client.spark.source_options import SourceOptions, parse_options
from feedapi_client.spark.stream import FeedStreamReader
from feedapi_client.testing import Publisher, Quirks, faults
from tests.spark.micro_batches import MicroBatchEngine, problems

pytestmark = pytest.mark.slow

PARTITIONS = 100


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def schedule(clock: Clock, *, bounded: bool = False) -> PollSchedule:
    limits = Limits(poll_interval=1, max_poll_interval=8)
    return PollSchedule(limits, bounded=bounded, clock=clock)


def pauses(polls: PollSchedule, clock: Clock, count: int) -> list[float]:
    """Poll partition 0 `count` times, without any event."""
    found = []
    for _ in range(count):
        found.append(polls.wait())
        clock.now += polls.wait()
        assert polls.take_due() == [0]
        polls.caught_up(0, moved=False)
    return found


def test_r15_pause_doubles_up_to_the_longest_and_falls_back_at_the_first_event(
    clock: Clock,
) -> None:
    polls = schedule(clock)
    polls.now(0)
    assert pauses(polls, clock, 6) == [0, 2, 4, 8, 8, 8]
    polls.caught_up(0, moved=True)
    assert pauses(polls, clock, 3) == [1, 2, 4]


def test_r15_partitions_are_polled_when_they_are_due_and_not_before(clock: Clock) -> None:
    polls = schedule(clock)
    polls.later(1, 3)
    polls.later(2, 2)
    assert polls.take_due() == []
    clock.now = 2
    assert polls.take_due() == [2]
    clock.now = 10
    assert polls.take_due() == [1]
    assert polls.take_due() == []
    assert polls.wait() == float("inf")


def test_forgotten_partition_is_not_polled(clock: Clock) -> None:
    polls = schedule(clock)
    polls.now(1)
    polls.forget(1)
    assert polls.take_due() == []
    assert polls.wait() == float("inf")


def test_partition_polled_anew_is_due_once(clock: Clock) -> None:
    polls = schedule(clock)
    polls.later(1, 5)
    polls.now(1)
    clock.now = 9
    assert polls.take_due() == [1]


def test_idle_partitions_together_are_polled_at_a_bounded_rate(clock: Clock) -> None:
    polls = schedule(clock, bounded=True)
    for partition in range(10_000):
        polls.now(partition)
    asked = 0
    while clock.now < 1000:
        for partition in polls.take_due():
            polls.caught_up(partition, moved=False)
            asked += 1
        clock.now += 0.5
    assert asked < 10_000 + 60 * 1000


# ---------------------------------------------------------------------- requests


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MAX_PAUSE", 0.002)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(partitions=PARTITIONS, page_size=50, checkpoint_every=10)
    with publisher.serve():
        yield publisher


def options_of(publisher: Publisher, **given: Any) -> SourceOptions:
    return parse_options({"url": str(publisher.url), "baseDelay": "0.01", **given})


def query(publisher: Publisher, tmp_path: Path, **given: Any) -> MicroBatchEngine:
    options = options_of(publisher, **given)
    return MicroBatchEngine(lambda: FeedStreamReader(options, tmp_path.as_uri()))


def fetches(publisher: Publisher) -> list[int]:
    return [request.partition or 0 for request in publisher.requests if request.kind == "fetch"]


def test_r15_idle_trigger_asks_no_partition_that_is_not_due(
    publisher: Publisher, tmp_path: Path
) -> None:
    engine = query(publisher, tmp_path, pollInterval="1000", maxPollInterval="2000")
    publisher.append(3, {"entity": "a", "n": 1})
    assert engine.trigger()
    assert not engine.trigger()
    publisher.clear_requests()
    for _ in range(20):
        assert not engine.trigger()
    assert fetches(publisher) == []


def test_epoch_reads_only_partitions_with_news(publisher: Publisher, tmp_path: Path) -> None:
    engine = query(publisher, tmp_path, pollInterval="0.001", maxPollInterval="0.001")
    for partition in range(PARTITIONS):
        publisher.append(partition, {"entity": str(partition), "n": 1})
    engine.run()
    engine.run()
    batches = len(engine.rows)
    publisher.append(7, {"entity": "7", "n": 2})
    publisher.append(9, {"entity": "9", "n": 2})
    publisher.clear_requests()
    engine.run()
    assert len(engine.rows) <= batches + 2
    assert {row["partition"] for row in engine.rows[max(engine.rows)]} <= {7, 9}
    plan = engine.reader._plans[engine.reader._current]  # type: ignore[attr-defined]
    assert {p for group in plan.groups for p in group} <= {7, 9}
    assert problems(engine.all_rows(), publisher.payloads()) == []


def test_ten_events_do_not_cost_a_request_of_every_idle_partition(
    publisher: Publisher, tmp_path: Path
) -> None:
    engine = query(publisher, tmp_path, pollInterval="1000", maxPollInterval="1000")
    for partition in range(PARTITIONS):
        publisher.append(partition, {"entity": str(partition), "n": 1})
    assert engine.trigger()
    assert not engine.trigger()
    planner: EpochPlanner = engine.reader._planner  # type: ignore[attr-defined]
    publisher.clear_requests()
    publisher.extend(7, [{"entity": "7", "n": n} for n in range(2, 12)])
    planner._polls.now(7)
    plan = planner.next_plan(None)
    assert plan is not None
    assert plan.groups == [[7]]
    assert fetches(publisher) == [7]


def test_r15_partition_whose_listed_end_moved_on_is_asked_before_it_is_due(
    publisher: Publisher,
) -> None:
    publisher.quirks = Quirks(last_cursor="always")
    publisher.append(1, {"n": 1})
    options = options_of(
        publisher, pollInterval="1000", maxPollInterval="1000", discoveryInterval="0.000001"
    )
    connection = FeedConnection(options)
    planner = EpochPlanner(options, connection)
    planner.next_plan(None)
    planner._more.clear()
    planner.next_plan(None)
    publisher.clear_requests()
    publisher.append(5, {"n": 1})
    plan = planner.next_plan(None)
    assert plan is not None
    assert plan.groups == [[5]]


@pytest.mark.parametrize("commands", [True, False])
@pytest.mark.parametrize("events", [0, 1])
def test_r10_unknown_commands_bring_the_next_discovery_forward(
    publisher: Publisher, events: int, commands: bool
) -> None:
    publisher.extend(0, [{"n": n} for n in range(events)])
    if commands:
        publisher.fail(faults.UnknownCommands(), times=None)
    options = options_of(
        publisher, pollInterval="1000", maxPollInterval="1000", discoveryInterval="10000"
    )
    connection = FeedConnection(options)
    planner = EpochPlanner(options, connection)
    planner.next_plan(None)
    planner._more.clear()
    assert (planner.pause() <= UNKNOWN_COMMAND_GAP_SECONDS) is commands


def test_only_so_many_partitions_are_asked_before_an_epoch(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.append(99, {"entity": "a", "n": 1})
    engine = query(publisher, tmp_path, pollInterval="0.001", maxPollInterval="0.001")
    engine.run()
    monkeypatch.setattr(planning, "_MAX_PROBES", 10)
    publisher.append(99, {"entity": "a", "n": 2})
    engine.restart()
    publisher.clear_requests()
    engine.trigger()
    assert len(fetches(publisher)) <= 10
    for _ in range(200):
        engine.trigger()
    assert problems(engine.all_rows(), publisher.payloads()) == []


def test_partition_closed_while_idle_is_drained_before_it_is_due(
    publisher: Publisher, tmp_path: Path
) -> None:
    engine = query(
        publisher,
        tmp_path,
        pollInterval="0.001",
        maxPollInterval="1000",
        discoveryInterval="0.001",
        settleTime="0.01",
    )
    for n in range(200):
        publisher.publish(f"e{n}", {"entity": f"e{n}", "n": n})
    engine.run()
    for method in ("starts-after", "cursor-from"):
        publisher.split(publisher.open_partitions()[0], into=2, method=method)
    for n in range(200, 400):
        publisher.publish(f"e{n}", {"entity": f"e{n}", "n": n})
    # Other partitions wait for their poll. The children of the split start at once.
    planner: EpochPlanner = engine.reader._planner  # type: ignore[attr-defined]
    for partition in planner.lineage.runnable():
        planner._polls.now(partition)
    engine.run()
    assert problems(engine.all_rows(), publisher.payloads()) == []
