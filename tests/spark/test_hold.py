"""Options ``minEventsPerTrigger``, ``maxTriggerDelay`` and ``failOnDataLoss``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.errors import CursorRejectedError
from feedapi_client.spark import stream
from feedapi_client.spark.plan.epoch_size import Hold
from feedapi_client.spark.source_options import parse_options
from feedapi_client.spark.stream import FeedStreamReader
from feedapi_client.testing import Publisher
from feedapi_client.testing.publisher.faults import Status
from tests.spark.micro_batches import MicroBatchEngine
from tests.spark.test_exactly_once import run_on


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MAX_PAUSE", 0.002)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(partitions=2, page_size=50, checkpoint_every=10)
    with publisher.serve():
        yield publisher


def query(publisher: Publisher, tmp_path: Path, **given: Any) -> MicroBatchEngine:
    at_once = {"pollInterval": "0.001", "maxPollInterval": "0.001", "baseDelay": "0.001"}
    options = parse_options({"url": str(publisher.url), **at_once, **given})
    return MicroBatchEngine(lambda: FeedStreamReader(options, tmp_path.as_uri()))


def test_without_a_minimum_no_epoch_is_held_back() -> None:
    assert Hold(None, 10).over(iter(()))


def test_epoch_is_held_back_until_there_are_enough_events() -> None:
    clock = Clock()
    hold = Hold(10, 100, clock=clock)
    assert not hold.over([3, 4])
    assert not hold.over([30])  # not counted again at once
    clock.now = 11
    assert hold.wait() == 0
    assert hold.over([3, 7])
    assert not hold.over([3])


def test_epoch_is_held_back_no_longer_than_the_delay() -> None:
    clock = Clock()
    hold = Hold(10, 100, clock=clock)
    assert not hold.over([1])
    clock.now = 99
    assert not hold.over([1])
    assert hold.wait() == pytest.approx(1)
    clock.now = 100
    assert hold.over(iter(()))


def test_events_are_counted_only_as_long_as_they_are_too_few() -> None:
    counted = []

    def counts() -> Iterator[int]:
        for count in (4, 7, 100):
            counted.append(count)
            yield count

    assert Hold(10, 100).over(counts())
    assert counted == [4, 7]


def test_small_epoch_waits_for_more_events(publisher: Publisher, tmp_path: Path) -> None:
    engine = query(publisher, tmp_path, minEventsPerTrigger="30", maxTriggerDelay="0.5")
    publisher.extend(0, [{"n": n} for n in range(30)])
    assert engine.trigger()
    publisher.extend(0, [{"n": n} for n in range(20)])
    engine2 = query(publisher, tmp_path / "2", minEventsPerTrigger="51", maxTriggerDelay="900")
    assert not engine2.trigger()
    assert not engine2.trigger()
    publisher.append(1, {"n": 1})
    engine2.reader._planner._hold._next_count = 0.0  # type: ignore[attr-defined]
    assert engine2.trigger()
    assert len(list(engine2.all_rows())) == 51


def test_available_now_does_not_wait_for_more_events(publisher: Publisher, tmp_path: Path) -> None:
    publisher.append(0, {"n": 1})
    engine = query(publisher, tmp_path, minEventsPerTrigger="100")
    engine.available_now()
    assert len(list(engine.all_rows())) == 1


@pytest.mark.parametrize("fail", ["true", "false"])
def test_r10_refused_cursor_is_an_error_unless_data_may_be_lost(
    publisher: Publisher, tmp_path: Path, fail: str, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.extend(0, [{"n": n} for n in range(30)])
    engine = query(publisher, tmp_path, failOnDataLoss=fail, partitions="0", refusedFor="0.1")
    engine.run()
    old = publisher.end_cursor(0)
    publisher.fail(refuses(old), partition=0, times=None)
    publisher.extend(0, [{"n": n} for n in range(30, 40)])
    if fail == "true":
        with pytest.raises(CursorRejectedError):
            run_on(engine)
        return
    with caplog.at_level(logging.WARNING):
        while len(list(engine.all_rows())) < 70:
            engine.run()
    assert "It is read from the first event that is left on" in caplog.text
    assert len(list(engine.all_rows())) == 70
    assert [row["sequence"] for row in engine.all_rows()] == list(range(70))


def refuses(cursor: str) -> Any:
    """A publisher that no longer has what comes after a cursor."""

    def fault(response: Any, request: Any, publisher: Any, /) -> Any:
        return Status(410)(response, request, publisher) if request.cursor == cursor else response

    return fault
