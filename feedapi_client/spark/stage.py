"""First fetch wins: a group of partitions is fetched once, staged, and read from there ever after. Runs on executors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import orjson
import pyarrow as pa

from feedapi_client.model import FeedInfo
from feedapi_client.options import FetchOptions
from feedapi_client.protocol.decoder import CheckpointedEvents
from feedapi_client.spark.fetch import Feed, Outcome, PartitionReader, Target
from feedapi_client.spark.options import SourceOptions
from feedapi_client.spark.schema import Payload, Rows
from feedapi_client.spark.staging import (
    MissingObjectError,
    Section,
    Staging,
    StagingError,
    compress,
    decompress,
    decompress_lines,
    pack,
    unpack,
)

_PATIENCE = 10.0
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Group:
    """What one task of an epoch reads. `fetch` and `info` are as the driver resolved them."""

    epoch: int
    number: int
    targets: list[Target]
    info: FeedInfo
    fetch: FetchOptions
    limit: int | None


class _Staged:
    """What is fetched of one partition, compressed as it comes."""

    def __init__(self, *, headers: bool) -> None:
        self.marks: list[tuple[int, str]] = []
        self.events = Section()
        self.headers = Section() if headers else None

    def take(self, run: CheckpointedEvents) -> None:
        """Add the events of the run and its checkpoint."""
        if not run.events:
            return
        self.events.add(b"\n".join([event._payload for event in run.events]))
        self.events.add(b"\n")
        if self.headers is not None:
            self.headers.add(b"".join(orjson.dumps(event.headers) + b"\n" for event in run.events))
        self.marks.append((len(run.events), run.cursor))

    def sections(self) -> list[list[bytes]]:
        """Checkpoints, payloads, headers."""
        return [
            [compress(orjson.dumps(self.marks))],
            self.events.finish(),
            self.headers.finish() if self.headers is not None else [],
        ]


def winner(options: SourceOptions, staging: Staging, group: Group) -> bytes:
    """The staged object of the group: what the first task got that fetched it, this one if there was none before.

    Raises `FeedError`, and `StagingError` when this process does not see the staging location of the driver.
    """
    key = staging.data_key(group.epoch, group.number)
    try:
        return staging.read(key)
    except MissingObjectError:
        pass
    _check_visible(staging, group)
    staged = fetch_group(options, group)
    if staging.create(key, staged):
        return staged
    return staging.read(key)


def _check_visible(staging: Staging, group: Group) -> None:
    if not staging.exists(staging.plan_key(group.epoch)):
        raise StagingError(
            f"the plan of epoch {group.epoch} is not at the staging location, seen from this executor: either the location is not shared by driver and "
            "executors (set option stagingLocation to an object store or a shared file system), or the epoch was finished and this task is late"
        )


def fetch_group(options: SourceOptions, group: Group) -> bytes:
    """Fetch every partition of the group and pack the object. Raises `FeedError`."""
    staged = [_Staged(headers=group.info.dialect == "v1") for _ in group.targets]

    def full() -> bool:
        return sum(one.events.size for one in staged) > options.limits.max_buffered_bytes

    def read(feed: Feed, target: Target, into: _Staged) -> Outcome:
        return PartitionReader(feed, target, limit=group.limit, full=full, patience=_PATIENCE).read(
            into.take
        )

    feed = Feed(options, group.fetch, group.info)
    if len(staged) == 1:
        outcomes = [read(feed, group.targets[0], staged[0])]
    else:
        with ThreadPoolExecutor(
            min(_THREADS, options.limits.max_concurrent_fetches, len(staged)),
            thread_name_prefix="feedapi-fetch",
        ) as pool:
            outcomes = list(
                pool.map(lambda pair: read(feed, *pair), zip(group.targets, staged, strict=True))
            )
    parts = [
        {**asdict(outcome), "sequence": target.sequence, "depth": target.depth}
        for outcome, target in zip(outcomes, group.targets, strict=True)
    ]
    return pack(parts, [section for one in staged for section in one.sections()])


def empty_object() -> bytes:
    """The object of a group that no sink read: it brings nothing, and keeps late tasks from staging anything."""
    return pack([])


def outcomes_of(header: Any) -> list[Outcome]:
    """What the header of a staged object says of its partitions."""
    return [Outcome(**{name: part[name] for name in Outcome.__slots__}) for part in header]


def batches(staged: bytes, key: str, payload: Payload, size: int) -> Iterator[pa.RecordBatch]:
    """The rows of a staged object, in Arrow batches of about `size` bytes. Raises `StagingError`."""
    header, sections = unpack(staged, key)
    for number, part in enumerate(header):
        marks, events, headers = sections[3 * number : 3 * number + 3]
        if not part["events"]:
            continue
        rows = Rows(
            part["partition"],
            part["depth"],
            part["sequence"],
            payload,
            orjson.loads(decompress(marks, key)),
        )
        header_lines = (
            (line for lines in decompress_lines(headers, key, size) for line in lines.splitlines())
            if len(headers)
            else None
        )
        for lines in decompress_lines(events, key, size):
            yield rows.batch(
                lines,
                list(islice(header_lines, lines.count(b"\n")))
                if header_lines is not None
                else None,
            )
        if rows.done != part["events"]:
            raise StagingError(
                f"staged object {key} holds {rows.done} events of partition {part['partition']}, its header says {part['events']}"
            )
