"""Option ``failOnDataLoss``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feedapi_client.errors import CursorRejectedError
from feedapi_client.spark.source_options import parse_options
from feedapi_client.spark.stream import FeedStreamReader
from feedapi_client.testing import Publisher
from feedapi_client.testing.publisher.faults import Status
from tests.spark.micro_batches import MicroBatchEngine
from tests.spark.test_exactly_once import run_on


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher(partitions=2, page_size=50, checkpoint_every=10)
    with publisher.serve():
        yield publisher


def query(publisher: Publisher, tmp_path: Path, **given: Any) -> MicroBatchEngine:
    at_once = {"pollInterval": "0.001", "maxPollInterval": "0.001", "baseDelay": "0.001"}
    options = parse_options({"url": str(publisher.url), **at_once, **given})
    return MicroBatchEngine(lambda: FeedStreamReader(options, tmp_path.as_uri()))


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
