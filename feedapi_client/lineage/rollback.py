"""A publisher that goes back behind a split: what it means, and how the cursors follow (R11).

After a renumbering split the consumer's cursors are those of the successors, and the ancestor is
superseded. A publisher that is rolled back lists the ancestor again. To move the cursors back the
successors are superseded in turn: when the publisher goes forward again, they are listed without a
position of their own, and take over the cursor of the ancestor as at the first time (R9).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from feedapi_client.errors import AmbiguousLineageError, LineageError
from feedapi_client.lineage.partition_names import names
from feedapi_client.model import FeedInfo, Position, Status
from feedapi_client.protocol.cursors import shown

_SHOWN = 8


def why_listed_again(status: Status) -> str:
    """Return what it means that a partition with this stored status is listed as open."""
    if status == "superseded":
        return (
            "is listed as open again, after its successors took over its cursor: nothing of it is "
            "read. Was the publisher rolled back? Then stop the consumer and give the cursor back "
            "with 'feedapi cursors restore'"
        )
    return (
        "is listed as open again, after it was closed and drained: it is read on from its end. Was "
        "the publisher rolled back? Then confirm that with 'feedapi cursors restore'"
    )


def presumed_successors(
    stored: Mapping[int, Position], info: FeedInfo, partitions: Collection[int], *, feed: str
) -> list[int]:
    """Return the partitions that hold the cursors of rolled back ones, as far as that is certain.

    These are the ones that were read and are not listed any more. The store does not keep whose
    successors they are.

    Arguments:
        stored: all positions of the consumer.
        info: what the feed lists, after its rollback.
        partitions: to be restored.
        feed: for messages.

    Raises:
        LineageError: one of the partitions has no position or is not over.
        AmbiguousLineageError: other partitions were rolled back, too.
    """
    _check_over(stored, partitions, feed)
    candidates = sorted(
        id
        for id, position in stored.items()
        if position.status == "open" and id not in info.partitions
    )
    others = [
        id
        for id, position in stored.items()
        if position.status == "superseded"
        and id in info.partitions
        and not info.partitions[id].closed
        and id not in partitions
    ]
    if candidates and others:
        raise AmbiguousLineageError(
            f"{names(others)} {'is' if len(others) == 1 else 'are'} listed as open again, too, and "
            f"{names(candidates)} may be successors of each: name those of this partition",
            feed=feed,
            partition=min(partitions),
        )
    return candidates


def restored_positions(
    stored: Mapping[int, Position],
    partitions: Collection[int],
    successors: Collection[int],
    cursor: str | None = None,
    *,
    feed: str,
) -> dict[int, Position]:
    """Return what has to be saved, in one save, to move cursors back to partitions.

    Arguments:
        stored: all positions of the consumer.
        partitions: those that are listed as open again. Several if they were merged.
        successors: those that hold their cursors now.
        cursor: where the partitions go on; None for the cursor of the successors.
        feed: for messages.

    Raises:
        LineageError: a partition has no position or is not over, or a successor has no position or
            is superseded itself.
        AmbiguousLineageError: the successors stand at different cursors, and no `cursor` is given.
    """
    _check_over(stored, partitions, feed)
    for successor in successors:
        position = stored.get(successor)
        if successor in partitions or position is None or position.status == "superseded":
            raise LineageError(
                "holds no cursor that could be moved back", feed=feed, partition=successor
            )
    target = cursor if cursor is not None else _common_cursor(stored, successors, feed, partitions)
    restored = {
        p: stored[p].advance(stored[p].cursor if target is None else target, "open")
        for p in partitions
    }
    return restored | {s: stored[s].advance(status="superseded") for s in successors}


def _check_over(stored: Mapping[int, Position], partitions: Collection[int], feed: str) -> None:
    for partition in sorted(partitions):
        position = stored.get(partition)
        if position is None or position.status == "open":
            why = "has no stored position" if position is None else "is not superseded or drained"
            raise LineageError(f"{why}: nothing to restore", feed=feed, partition=partition)


def _common_cursor(
    stored: Mapping[int, Position],
    successors: Collection[int],
    feed: str,
    partitions: Collection[int],
) -> str | None:
    """Return the one cursor of the successors; None without any."""
    cursors = {stored[s].cursor for s in successors}
    if len(cursors) > 1:
        stand = ", ".join(f"{s} at {shown(stored[s].cursor)}" for s in sorted(successors)[:_SHOWN])
        raise AmbiguousLineageError(
            f"its successors stand at different cursors: {stand}. Give the cursor to go on from: "
            "events between them are repeated from the earliest, and skipped from a later one",
            feed=feed,
            partition=min(partitions),
        )
    if not cursors and any(stored[p].status == "superseded" for p in partitions):
        raise LineageError(
            "its successors are not known: name them, or give the cursor to go on from",
            feed=feed,
            partition=min(partitions),
        )
    return cursors.pop() if cursors else None
