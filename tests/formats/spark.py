"""The golden files of what Spark's source and ingest store: how they are made.

A staged object is stored twice: as it is, which is what is read, and as what it holds, so that a
change shows what changed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from feedapi_client.model import FeedInfo, Partition, Position
from feedapi_client.options import FetchOptions
from feedapi_client.spark.epoch import EpochPlan, FetchTask, encode
from feedapi_client.spark.fetch import Target
from feedapi_client.spark.ingest.checkpoint import note
from feedapi_client.spark.ingest.parquet_table import Decision, WrittenFiles
from feedapi_client.spark.schema import staged_rows
from feedapi_client.spark.source_options import SourceOptions, parse_options
from feedapi_client.spark.staging import inflate, unpack
from feedapi_client.spark.stream import Epoch, fetch_task
from feedapi_client.testing import Publisher

RUN = "0123456789abcdef0123456789abcdef"
INFO = FeedInfo(
    "v2-token",
    {
        0: Partition(0, closed=True, last_cursor="end"),
        1: Partition(1, starts_after=0),
        2: Partition(2, cursor_from=(0, 1)),
    },
    token="token-1",
    exactly_once=True,
    filters=("kind",),
)
PLAN = EpochPlan(
    feed="f" * 64,
    name="https://shop.test/orders",
    info=INFO,
    positions={0: Position("end", "drained", 4), 1: Position("cursor-9", revision=2)},
    sequences={0: 12, 1: 5},
    depths={1: 1},
    known={0, 1, 2},
    selected=frozenset({1, 2}),
    groups=[[1], [2]],
    limit=1000,
    max_bytes=65536,
    late={0: 1764028800.0},
    chosen=frozenset({1}),
    ends={1: "cursor-20"},
    driver=3,
)
DECISION = Decision([WrittenFiles("output", "_attempts/3-7", "data/query/7")])
OFFSET = Epoch(RUN, 7)
OUTPUTS = {"output": "delta.orders", "rejected": "delta.rejected"}
STAGED = {"data": [None] * 3, "data-with-headers": [{"h": "v1"}, {"h": "v2"}, {"h": "v3"}]}
"""The headers of the events in each staged object: `{"n": 1}` and so on."""


def staged_objects() -> dict[str, dict[str, Any]]:
    """Return the golden copies of staged objects, as this version writes them."""
    plan = encode(PLAN)
    made = {"plan": _golden(plan, json.loads(inflate(plan, "plan")))}
    with _publisher("v2-token") as (options, info):
        target = Target(0, "_first", 10, 1, None)
        task = FetchTask(0, 0, [target], info, FetchOptions(), None)
        made["data"] = _golden_events(fetch_task(options, task))
    with _publisher("v1") as (options, info):
        target = Target(0, "_first", 0, 0, None)
        fetch = FetchOptions(v1_headers=("h",))
        made["data-with-headers"] = _golden_events(
            fetch_task(options, FetchTask(0, 0, [target], info, fetch, None))
        )
    return made


@contextmanager
def _publisher(dialect: Any) -> Iterator[tuple[SourceOptions, FeedInfo]]:
    publisher = Publisher(partitions=1, dialect=dialect)
    for n in (1, 2, 3):
        publisher.append(0, {"n": n}, headers={"h": f"v{n}"})
    info = FeedInfo(dialect, {0: Partition(0)}, token=publisher.token)
    with publisher.serve() as url:
        yield parse_options({"url": url}), info


def _golden(staged: bytes, content: Any) -> dict[str, Any]:
    return {"object": base64.b64encode(staged).decode(), "content": content}


def _golden_events(staged: bytes) -> dict[str, Any]:
    rows = [row for batch in staged_rows(staged, "object") for row in batch.to_pylist()]
    content = {"magic": staged[:4].decode(), "results": unpack(staged, "object")[0], "rows": rows}
    return _golden(staged, json.loads(json.dumps(content)))


def small_objects() -> dict[str, Any]:
    """Return what is stored as JSON, as this version writes it."""
    return {
        "decision": json.loads(msgspec.json.encode(DECISION)),
        "offset": OFFSET.offset(),
        "outputs": _noted(
            lambda spark: note(spark, "c", "outputs", tables=OUTPUTS, location="c", feed="x")
        ),
        "resumed": _noted(lambda spark: note(spark, "c", "resumed", run=RUN)),
    }


class _Written:
    """Takes the place of a Spark session that writes one line."""

    line = ""

    def createDataFrame(self, rows: list[tuple[str]], schema: str) -> _Written:
        ((self.line,),) = rows
        return self

    def __getattr__(self, name: str) -> Any:
        return self if name == "write" else lambda *_, **__: self


def _noted(write: Any) -> Any:
    written = _Written()
    write(written)
    return json.loads(written.line)
