"""``spark.read.format("feedapi")``: every partition to its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import orjson
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from feedapi_client.errors import CursorRejectedError
from feedapi_client.lineage.planner import Fail, Planner
from feedapi_client.model import FeedInfo
from feedapi_client.options import FetchOptions
from feedapi_client.protocol.decoder import CheckpointedEvents
from feedapi_client.spark.fetch import Feed, PartitionReader, Target, read_end
from feedapi_client.spark.options import SourceOptions
from feedapi_client.spark.schema import Rows
from feedapi_client.spark.tracker import check_partitions


@dataclass(frozen=True, slots=True)
class Chain:
    """The partitions that one task reads, one after the other."""

    targets: list[Target]
    info: FeedInfo
    fetch: FetchOptions


class ChainPartition(InputPartition):
    """One task."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    def __repr__(self) -> str:
        return f"ChainPartition({[target.partition for target in self.chain.targets]})"


class FeedReader(DataSourceReader):
    """The source of one batch read.

    The end of an open partition is where it is caught up, so that two actions on one DataFrame may see different ends: cache it, or write it out first.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        """One for each lineage chain. Raises `FeedError`, `OptionError`."""
        feed = Feed(self.options)
        info = feed.info
        return [
            ChainPartition(Chain(targets, _slim(info, targets), feed.fetch_options))
            for targets in chains(self.options, feed, info)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a chain. A feed without partitions has one task without rows. Raises `FeedError`."""
        if not isinstance(partition, ChainPartition):
            return
        feed = Feed(self.options, partition.chain.fetch, partition.chain.info)
        for target in partition.chain.targets:
            yield from _read(self.options, feed, target)


def chains(options: SourceOptions, feed: Feed, info: FeedInfo) -> list[list[Target]]:
    """Where to read from, cut into lineage chains: a partition goes on the chain of its parent as long as that has no other child.

    Chains may run at the same time; `depth` says what came first. Raises `FeedError`, `OptionError`.
    """
    if options.partitions is not None:
        check_partitions(options, info)
        info = replace(
            info,
            partitions={p.id: p for p in info.partitions.values() if p.id in options.partitions},
        )
    # Unordered: a batch reads the children whether or not their parents were read before.
    planner = Planner(feed=feed.url, start=options.start, ordered=False)
    planner.load({})
    ends = {partition: read_end(feed, partition) for partition in planner.unresolved(info)}
    for action in planner.discover(info, ends=ends):
        if isinstance(action, Fail):
            raise action.error
    found: list[list[Target]] = []
    chain_of: dict[int, list[Target]] = {}
    cursors = planner.runnable()
    for partition in sorted(cursors, key=lambda p: (planner.graph.depth(p), p)):
        listed = info.partitions[partition]
        target = Target(
            partition,
            cursors[partition],
            listed.closed,
            listed.last_cursor,
            0,
            planner.graph.depth(partition),
        )
        parent = listed.starts_after
        only_child = parent is not None and len(planner.graph.children[parent]) == 1
        chain = chain_of.get(parent) if only_child and parent is not None else None
        if chain is None:
            chain = []
            found.append(chain)
        chain.append(target)
        chain_of[partition] = chain
    return found


def _slim(info: FeedInfo, targets: list[Target]) -> FeedInfo:
    if info.dialect == "v1":
        return info
    return replace(
        info, partitions={target.partition: info.partitions[target.partition] for target in targets}
    )


def _read(options: SourceOptions, feed: Feed, target: Target) -> Iterator[pa.RecordBatch]:
    """The partition to its end, in Arrow batches of about `Limits.max_batch_bytes`."""
    reader, sequence = PartitionReader(feed, target), 0
    pending: list[CheckpointedEvents] = []
    for run in reader.runs():
        if run.events:
            pending.append(run)
        if sum(one.size for one in pending) >= options.limits.max_batch_bytes:
            yield _rows(options, feed, target, sequence, pending)
            sequence += sum(len(one.events) for one in pending)
            pending = []
    if pending:
        yield _rows(options, feed, target, sequence, pending)
    if reader.outcome.refused is not None:
        raise CursorRejectedError(
            f"the publisher refused a fetch from {reader.outcome.cursor!r} (status {reader.outcome.refused or 'not listed any more'}): "
            "the partitions changed while they were read. Read again",
            feed=feed.url,
            partition=target.partition,
        )


def _rows(
    options: SourceOptions,
    feed: Feed,
    target: Target,
    sequence: int,
    runs: list[CheckpointedEvents],
) -> pa.RecordBatch:
    events = [event for run in runs for event in run.events]
    rows = Rows(
        target.partition,
        target.depth,
        sequence,
        options.payload,
        [(len(run.events), run.cursor) for run in runs],
    )
    headers = (
        [orjson.dumps(event.headers) for event in events] if feed.info.dialect == "v1" else None
    )
    return rows.batch(b"\n".join([event._payload for event in events]), headers)
