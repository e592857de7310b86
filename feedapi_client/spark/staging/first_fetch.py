"""First fetch wins: each task of an epoch is fetched once and read from its staged object after.

Runs on executors. The first attempt that stages its object decides what the epoch holds. All other
attempts, whether concurrent or later, read that object.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from typing import Any

import msgspec
import orjson
import pyarrow as pa

from feedapi_client.protocol.page import CheckpointedEvents
from feedapi_client.spark.feed_access import FeedConnection
from feedapi_client.spark.fetch import FetchResult, Target, fetch
from feedapi_client.spark.plan.epoch import FetchTask
from feedapi_client.spark.schema import RowBuilder
from feedapi_client.spark.source_options import SourceOptions
from feedapi_client.spark.staging.format import (
    Section,
    compress,
    decompress,
    decompress_lines,
    pack,
    torn,
    unpack,
    whole,
)
from feedapi_client.spark.staging.location import Staging
from feedapi_client.spark.staging.staging_errors import MissingObjectError, StagingError

_THREADS = 8


def fetch_once(options: SourceOptions, staging: Staging, task: FetchTask) -> bytes:
    """Return the staged object of the task, fetching and staging it when there is none yet.

    Raises `FeedError`, and `StagingError` where the location failed or is not the driver's.
    """
    key = staging.data_key(task.epoch, task.number)
    try:
        staged = staging.read(key)
    except MissingObjectError:
        if not staging.exists(staging.plan_key(task.epoch)):
            raise StagingError(
                f"the plan of epoch {task.epoch} is not at the staging location, seen from this "
                "executor: either the location is not shared by driver and executors (set option "
                "stagingLocation to an object store or a shared file system), or the epoch was "
                "finished and this task is late"
            ) from None
        staging.check_not_delivered(key)
        staged = fetch_task(options, task)
        if not staging.create(key, staged):
            staged = staging.read(key)
    staging.mark_delivered(key)
    return staged


class _Compressed:
    """The events of one partition, compressed as they are fetched."""

    def __init__(self, *, headers: bool) -> None:
        self.bytes = 0
        """Bytes that the events took in the responses."""
        self.checkpoints: list[tuple[int, str]] = []
        self.events = Section()
        self.headers = Section() if headers else None

    def add(self, batch: CheckpointedEvents) -> None:
        if not batch.events:
            return
        self.bytes += batch.size
        self.events.add(b"\n".join([event._payload for event in batch.events]))
        self.events.add(b"\n")
        if self.headers is not None:
            lines = [orjson.dumps(event.headers) + b"\n" for event in batch.events]
            self.headers.add(b"".join(lines))
        self.checkpoints.append((len(batch.events), batch.cursor))

    def sections(self) -> list[list[bytes]]:
        return [
            [compress(orjson.dumps(self.checkpoints))],
            self.events.finish(),
            self.headers.finish() if self.headers is not None else [],
        ]


def fetch_task(options: SourceOptions, task: FetchTask) -> bytes:
    """Fetch every partition of the task and return the object to stage. Raises `FeedError`."""
    fetched = [_Compressed(headers=task.info.dialect == "v1") for _ in task.targets]

    def full() -> bool:
        return sum(one.events.size for one in fetched) > options.limits.max_buffered_bytes

    def read(target: Target, into: _Compressed) -> FetchResult:
        def enough() -> bool:
            return full() or (task.max_bytes is not None and into.bytes >= task.max_bytes)

        return fetch(connection, target, limit=task.limit, full=enough, receive=into.add)

    connection = FeedConnection(options, task.fetch, task.info)
    if len(fetched) == 1:
        results = [read(task.targets[0], fetched[0])]
    else:
        threads = min(_THREADS, options.limits.max_concurrent_fetches, len(fetched))
        with ThreadPoolExecutor(threads, thread_name_prefix="feedapi-fetch") as pool:
            results = list(pool.map(read, task.targets, fetched))
    header = [
        {**asdict(result), "sequence": target.sequence, "depth": target.depth}
        for result, target in zip(results, task.targets, strict=True)
    ]
    return pack(header, [section for one in fetched for section in one.sections()])


def results_in(header: Any, key: str) -> list[FetchResult]:
    """Return the results of a task from the header of its staged object. Raises `StagingError`."""
    with whole(key):
        return msgspec.convert(header, list[FetchResult])


class _Rows(msgspec.Struct):
    """What a header says of the rows of a partition."""

    partition: int
    events: int
    depth: int
    sequence: int


def rows_of(staged: bytes, key: str, size: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a staged object in Arrow batches of about `size` bytes.

    Raises `StagingError` for a torn object, and one that holds other rows than its header says.
    """
    header, sections = unpack(staged, key)
    with whole(key):
        rows = msgspec.convert(header, list[_Rows])
        parts = list(zip(rows, *(sections[n::3] for n in range(3)), strict=True))
    for expected, checkpoints, events, headers in parts:
        if not expected.events:
            continue
        with whole(key):
            found = msgspec.json.decode(decompress(checkpoints, key), type=list[tuple[int, str]])
        builder = RowBuilder(expected.partition, expected.depth, expected.sequence, found)
        header_lines = (
            line for lines in decompress_lines(headers, key, size) for line in lines.splitlines()
        )
        for lines in decompress_lines(events, key, size):
            count = lines.count(b"\n") if len(headers) else 0
            with whole(key):
                batch = builder.build(lines, list(islice(header_lines, count)))
            if builder.built > expected.events:
                break
            yield batch
        if builder.built != expected.events:
            raise torn(key)
