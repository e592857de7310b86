"""Option ``partitions``: which partitions are read. Imports no Spark."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from feedapi_client.model import FeedInfo
from feedapi_client.spark.options import OptionError, SourceOptions


def check_partitions(
    options: SourceOptions, info: FeedInfo, named: frozenset[int] | None = None
) -> None:
    """Raise `OptionError` when option ``partitions`` names one that the feed does not list.

    `named` are those of them to check; by default all.
    """
    missing = sorted((named or options.partitions or frozenset()) - info.partitions.keys())
    if missing:
        raise OptionError(
            f"feedapi source: option partitions names {', '.join(map(str, missing[:8]))}, which "
            "the feed does not list"
        )


def added_partitions(options: SourceOptions, chosen: Collection[int] | None) -> frozenset[int]:
    """Return the partitions that option ``partitions`` names now, and did not name before.

    Arguments:
        options: of the query that starts again.
        chosen: what the option named when the last plan was made.

    Raises:
        OptionError: the option no longer names one that it named. Its descendants can't be told
            from those of others.
    """
    if options.partitions is None or chosen is None:
        return frozenset()
    removed = sorted(set(chosen) - options.partitions)
    if removed:
        raise OptionError(
            f"feedapi source: option partitions no longer names {', '.join(map(str, removed[:8]))}."
            " A query can get more partitions when it starts again, not fewer: name them too, or "
            "start a new query with a checkpoint location of its own"
        )
    return options.partitions - set(chosen)


def only(info: FeedInfo, partitions: Collection[int]) -> FeedInfo:
    """Return the discovery with these partitions only, as much as a task needs of it."""
    return replace(info, partitions={id: info.partitions[id] for id in partitions})
