"""What an epoch reads: groups, failing partitions, the selection of partitions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from feedapi_client.errors import FeedUnavailableError
from feedapi_client.model import FIRST
from feedapi_client.options import RetryPolicy
from feedapi_client.spark.feed_access import FeedConnection
from feedapi_client.spark.plan.epoch import split_into_groups
from feedapi_client.spark.plan.epoch_planner import EpochPlanner
from feedapi_client.spark.plan.failing_partitions import FailingPartitions
from feedapi_client.spark.source_options import OptionError, SourceOptions, parse_options
from feedapi_client.testing import Publisher, Quirks


@pytest.mark.parametrize(
    ("count", "size", "groups"),
    [(0, None, []), (5, 2, [2, 2, 1]), (5, None, [1] * 5), (40, None, [2] * 8 + [1] * 24)],
)
def test_partitions_are_spread_evenly_over_tasks(
    count: int, size: int | None, groups: list[int]
) -> None:
    found = split_into_groups(list(range(count)), size)
    assert [len(group) for group in found] == groups
    assert sorted(partition for group in found for partition in group) == list(range(count))


def test_r14_failing_partition_is_asked_again_after_a_pause() -> None:
    failures = FailingPartitions(
        "http://service/feed", RetryPolicy(base_delay=1000, max_delay=1000)
    )
    assert failures.may_ask(1)
    failures.failed(1, "no answer")
    assert not failures.may_ask(1)
    assert failures.may_ask(2)
    failures.succeeded(1)
    assert failures.may_ask(1)


def test_r14_partition_that_fails_for_too_long_is_an_error() -> None:
    failures = FailingPartitions("http://service/feed", RetryPolicy(give_up_after=0.0))
    with pytest.raises(FeedUnavailableError, match="failed for 0 s, the last time with no answer"):
        failures.failed(1, "no answer")


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(partitions=2)
    publisher.extend(0, [{"n": n} for n in range(5)])
    publisher.extend(1, [{"n": n} for n in range(5)])
    with publisher.serve():
        yield publisher


def options_of(publisher: Publisher, **given: str) -> SourceOptions:
    return parse_options({"url": str(publisher.url), **given})


def test_selection_of_an_unlisted_partition_is_an_error(publisher: Publisher) -> None:
    options = options_of(publisher, partitions="0,7")
    planner = EpochPlanner(options, FeedConnection(options))
    with pytest.raises(OptionError, match="option partitions names 7, which the feed does not"):
        planner.next_plan(None)


def test_plan_keeps_the_selection_for_the_next_driver(publisher: Publisher) -> None:
    options = options_of(publisher, partitions="1", discoveryInterval="0.000001")
    connection = FeedConnection(options)
    planner = EpochPlanner(options, connection)
    assert planner.next_plan(None) is not None
    children = publisher.split(1, into=2, method="starts-after")
    publisher.split(0, into=2, method="starts-after")
    plan = planner.next_plan(None)
    assert plan is not None
    assert plan.selected == [1, *children]
    assert plan.groups == [[1]]
    assert EpochPlanner(options, connection, plan).lineage.selected == frozenset((1, *children))


def test_selected_partition_that_is_gone_before_its_turn_is_no_error(publisher: Publisher) -> None:
    options = options_of(publisher, partitions="1", discoveryInterval="0.000001")
    connection = FeedConnection(options)
    planner = EpochPlanner(options, connection)
    planner.next_plan(None)
    child, _ = publisher.split(1, into=2, method="starts-after")
    planner.next_plan(None)
    publisher.split(child, into=2, method="cursor-from")
    plan = planner.next_plan(None)
    assert plan is not None
    assert child in (plan.selected or [])
    assert child not in plan.info.partitions
    assert EpochPlanner(options, connection, plan).next_plan(None) is not None


def test_positions_outside_a_later_selection_are_kept(publisher: Publisher) -> None:
    everything, one = options_of(publisher), options_of(publisher, partitions="1")
    connection = FeedConnection(everything)
    first = EpochPlanner(everything, connection).next_plan(None)
    assert first is not None
    later = EpochPlanner(one, connection, first).next_plan(None)
    assert later is not None
    assert later.groups == [[1]]
    assert {id: position.cursor for id, position in later.positions.items()} == {
        0: FIRST,
        1: FIRST,
    }


def test_r08_lineage_keeps_children_behind_a_parent_that_the_feed_does_not_name() -> None:
    publisher = Publisher(partitions=1, quirks=Quirks(omit_parent_zero=True))
    publisher.extend(0, [{"n": n} for n in range(5)])
    with publisher.serve():
        options = options_of(publisher, lineage="1:0,2:0", discoveryInterval="0.000001")
        publisher.split(0, into=2)
        connection = FeedConnection(options)
        plan = EpochPlanner(options, connection).next_plan(None)
        assert plan is not None
        assert plan.groups == [[0]]


def test_r08_lineage_may_be_given_to_a_query_whose_checkpoint_knows_no_child() -> None:
    publisher = Publisher(partitions=1, quirks=Quirks(omit_parent_zero=True))
    publisher.extend(0, [{"n": n} for n in range(5)])
    with publisher.serve():
        options = options_of(publisher)
        connection = FeedConnection(options)
        plan = EpochPlanner(options, connection).next_plan(None)
        assert plan is not None
        publisher.split(0, into=2)
        options = options_of(publisher, lineage="1:0,2:0")
        connection = FeedConnection(options)
        later = EpochPlanner(options, connection, plan).next_plan(None)
        assert later is not None
        assert later.groups == [[0]]
