"""What a query waits for: refusals that pass, ends that prove to be none, feeds that hang."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.errors import (
    AuthenticationError,
    CursorRejectedError,
    FeedError,
    ProtocolError,
    TransportError,
)
from feedapi_client.spark import feed_watch
from feedapi_client.testing import Publisher, Quirks
from feedapi_client.testing.publisher.faults import (
    Both,
    EmptyPage,
    Hang,
    Lag,
    Redirect,
    Replace,
    Status,
    Trickle,
)
from tests.spark.micro_batches import MicroBatchEngine, problems, publish, query

pytestmark = pytest.mark.slow

Start = Callable[..., MicroBatchEngine]


@pytest.fixture
def start(publisher: Publisher, tmp_path: Path) -> Start:
    return partial(query, publisher, tmp_path)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(partitions=2, page_size=40, checkpoint_every=10, seed=7)
    with publisher.serve():
        yield publisher


def wait(engine: MicroBatchEngine, reached: Callable[[], object]) -> None:
    """Trigger until it is so."""
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end
        engine.trigger()


def report_of(engine: MicroBatchEngine) -> dict[str, Any]:
    reader: Any = engine.reader
    return dict(reader.reportLatestOffset() or {})


# ---------------------------------------------------------------------- refusals


ELSEWHERE = Redirect("https://login.invalid/?session=s3cret")


@pytest.mark.parametrize("status", [400, 401, 402, 403, 404, 405, 409, 410, 421, 451, ELSEWHERE])
def test_r10_refusals_that_pass_end_no_query(
    start: Start, publisher: Publisher, status: int | Redirect
) -> None:
    publish(publisher, 50)
    engine = start()
    engine.run()
    publish(publisher, 50)
    publisher.fail(status, partition=0, times=8)
    wait(engine, lambda: len(list(engine.all_rows())) == 100)
    assert problems(engine.all_rows(), publisher.payloads()) == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, CursorRejectedError),
        (401, AuthenticationError),
        (403, AuthenticationError),
        (402, ProtocolError),
        (405, CursorRejectedError),
        (409, ProtocolError),
        (410, CursorRejectedError),
        (ELSEWHERE, TransportError),
    ],
)
def test_r10_refusals_that_last_are_an_error_after_a_while(
    start: Start, publisher: Publisher, status: int | Redirect, kind: type[FeedError]
) -> None:
    publish(publisher, 50)
    engine = start(refusedFor="0.5")
    engine.run()
    publish(publisher, 50)
    publisher.fail(status, partition=0, times=None)
    began = time.monotonic()
    with pytest.raises(kind, match="while discovery lists the partition") as caught:
        wait(engine, lambda: False)
    assert type(caught.value) is kind
    assert caught.value.partition == 0
    assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize("status", [402, 451, ELSEWHERE])
def test_r10_what_a_gateway_answers_is_no_refusal_of_a_cursor(
    start: Start, publisher: Publisher, status: int | Redirect
) -> None:
    """With failOnDataLoss=false a partition whose cursor is refused would begin anew."""
    publish(publisher, 50)
    engine = start(refusedFor="0.5", failOnDataLoss="false")
    engine.run()
    publish(publisher, 50)
    publisher.fail(status, partition=0, times=None)
    with pytest.raises(FeedError, match="while discovery lists the partition") as caught:
        wait(engine, lambda: False)
    assert not isinstance(caught.value, CursorRejectedError)
    assert "s3cret" not in str(caught.value)


# ---------------------------------------------------------------------- late is better than lost


def drain_too_early(engine: MicroBatchEngine, publisher: Publisher) -> None:
    """Let replicas that lag show an end of partition 0 before its last events."""
    publish(publisher, 50)
    engine.run()
    publish(publisher, 50)
    publisher.fail(EmptyPage(moving=False), partition=0, times=None)
    publisher.close(0)
    wait(engine, lambda: report_of(engine)["drained"] == 1)
    batches = len(engine.rows)
    publisher.append(1, {"entity": "other", "n": 1})
    wait(engine, lambda: len(engine.rows) > batches)  # whose plan holds that end
    assert problems(engine.all_rows(), publisher.payloads()) != []
    publisher.heal()


def test_r06_next_run_asks_once_more_behind_such_an_end(start: Start, publisher: Publisher) -> None:
    publisher.quirks = Quirks(last_cursor="never")
    engine = start(discoveryInterval="0.01")
    drain_too_early(engine, publisher)
    engine.available_now()
    assert problems(engine.all_rows(), publisher.payloads()) == []


# ---------------------------------------------------------------------- feeds that hang


@pytest.mark.parametrize("partitions", [1, 20])
def test_r14_partitions_of_a_feed_that_hangs_are_not_caught_up(
    partitions: int, tmp_path: Path
) -> None:
    """Only four are asked at a time: the others wait for their turn."""
    publisher = Publisher(partitions=partitions)
    with publisher.serve():
        engine = query(publisher, tmp_path, requestTimeout="600", maxConcurrentFetches="4")
        for partition in range(partitions):
            publisher.append(partition, {"entity": "a", "n": partition})
        wait(engine, lambda: report_of(engine).get("caughtUpPartitions") == partitions)
        publisher.fail(Hang(), times=None, on="fetch")
        wait(engine, lambda: report_of(engine)["caughtUpPartitions"] == 0)
        assert report_of(engine)["reading"] == partitions


@pytest.mark.parametrize(
    "fault",
    [Hang(), Both((Replace(b"\n" * 10_000), Trickle(interval=0.01)))],
    ids=["hangs", "trickles"],
)
def test_r14_available_now_ends_where_a_feed_hangs_for_too_long(
    start: Start, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    publish(publisher, 30)
    engine = start(requestTimeout="0.3", slotTimeout="0.3", giveUpAfter="2")
    engine.available_now()
    publish(publisher, 30)
    publisher.fail(fault, times=None, on="any")
    with pytest.raises(TransportError, match=str(publisher.url)):
        engine.available_now()
    engine.reader.stop()
    publisher.heal()
    engine.available_now()
    assert len(list(engine.all_rows())) == 60


@pytest.mark.parametrize("fault", [Status(503), Hang()], ids=["503", "hangs"])
def test_r14_restart_does_not_wait_for_a_feed_that_is_down(
    start: Start, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    """Spark asks the sources of a query in turn: the others would wait for this one."""
    monkeypatch.setattr(feed_watch, "_PATIENCE", 0.0)
    publish(publisher, 30)
    engine = start(requestTimeout="0.3", maxDelay="0.02")
    engine.run()
    publisher.fail(fault, times=None, on="any")
    engine.restart()
    publish(publisher, 10)
    assert not engine.trigger()
    publisher.heal()
    wait(engine, lambda: problems(engine.all_rows(), publisher.payloads()) == [])


# ---------------------------------------------------------------------- replicas that lag


@pytest.mark.parametrize("ahead", ["echo", "tail", "silent"])
@pytest.mark.parametrize("last_cursor", ["never", "closed"])
def test_available_now_skips_nothing_that_a_lagging_replica_does_not_show(
    start: Start, publisher: Publisher, ahead: Any, last_cursor: Any
) -> None:
    """Half of all answers are those of a replica that lags: a run may end too early."""
    publisher.quirks = Quirks(last_cursor=last_cursor)
    chance = random.Random(3)
    lag = Lag(0.3, ahead)

    def half(response: Any, request: Any, feed: Any, /) -> Any:
        return lag(response, request, feed) if chance.random() < 0.5 else response

    engine = start(discoveryInterval="0.05", settleTime="0.1")
    for step in range(6):
        publish(publisher, 40)
        if step == 2:
            publisher.split(0, into=2, method="starts-after")
        if step == 4:
            publisher.split(1, into=2, method="cursor-from")
        publisher.fail(half, times=None)
        engine.available_now()
        if step % 2:  # what a run did not get, the next one does, once replicas know it
            publisher.heal()
            engine.available_now()
            found = problems(engine.all_rows(), publisher.payloads())
            if ahead == "tail":  # an older place of the partition, from where events come again
                found = [one for one in found if one.startswith("lost")]
            assert found == []
