"""Which partitions are read: option ``partitions``. Imports no Spark."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from feedapi_client.model import FeedInfo
from feedapi_client.spark.options import OptionError, SourceOptions


class PartitionSelection:
    """The partitions that a streaming query reads.

    Without option ``partitions``, all. With it, those named there, and those listed later that
    descend from a selected one.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self.known: set[int] = set()
        """Every partition that was ever listed."""
        self.selected: set[int] | None = None
        """The partitions to read; None before the first discovery, and without the option."""

    def restore(self, known: Iterable[int], selected: Iterable[int] | None) -> None:
        """Set what an earlier process knew."""
        self.known = set(known)
        self.selected = None if selected is None else set(selected)

    def apply(self, info: FeedInfo) -> FeedInfo:
        """Return the discovery without the partitions that are not selected.

        Raises:
            OptionError: at the first discovery, the option names a partition that is not listed.
        """
        if self._options.partitions is None:
            self.known |= info.partitions.keys()
            return info
        if self.selected is None:
            check_partitions(self._options, info)
            self.selected = set(self._options.partitions)
        else:
            self._add_descendants(self.selected, info)
        self.known |= info.partitions.keys()
        return only(info, self.selected)

    def _add_descendants(self, selected: set[int], info: FeedInfo) -> None:
        new = [p for p in info.partitions.values() if p.id not in self.known]
        for _ in new:  # one round a generation: a child may be listed before its parent
            found = {
                p.id
                for p in new
                if p.starts_after in selected or selected.intersection(p.cursor_from)
            }
            if found <= selected:
                return
            selected |= found


def only(info: FeedInfo, partitions: Collection[int]) -> FeedInfo:
    """Return the discovery with these partitions only."""
    listed = info.partitions.values()
    return replace(info, partitions={p.id: p for p in listed if p.id in partitions})


def check_partitions(options: SourceOptions, info: FeedInfo) -> None:
    """Raise `OptionError` when option ``partitions`` names one that the feed does not list."""
    missing = sorted((options.partitions or frozenset()) - info.partitions.keys())
    if missing:
        raise OptionError(
            f"feedapi source: option partitions names {', '.join(map(str, missing[:8]))}, which "
            "the feed does not list"
        )
