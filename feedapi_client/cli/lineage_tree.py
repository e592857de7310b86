"""Draw the lineage of a feed's partitions as a tree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from rich.text import Text
from rich.tree import Tree

from feedapi_client.model import Partition

Label = Callable[[int], Text]
"""Returns what to show for a listed partition."""


def lineage_tree(
    partitions: Mapping[int, Partition],
    title: Text,
    label: Label,
    added: Collection[int] = (),
) -> Tree:
    """Return a tree that shows each partition below its parent.

    The edges of the children in `added` are marked: ``--lineage`` added them.

    The parent is the partition that it starts after, or else the nearest one that it takes its
    cursor from. A parent that is no longer listed is shown too.
    """
    children: dict[int | None, list[int]] = {}
    for partition in partitions.values():
        children.setdefault(_parent(partition), []).append(partition.id)
    tree = Tree(title, guide_style="dim")
    unlisted = [parent for parent in children if parent is not None and parent not in partitions]
    # A stack instead of recursion: a chain of splits may be longer than Python's recursion limit.
    pending: list[tuple[Tree, int]] = [
        (tree, root) for root in sorted({*children.get(None, ()), *unlisted}, reverse=True)
    ]
    while pending:
        above, id = pending.pop()
        text = _edge(partitions.get(id), added) + (
            label(id) if id in partitions else Text(f"{id}  no longer listed", style="dim")
        )
        branch = above.add(text)
        pending += [(branch, child) for child in sorted(children.get(id, ()), reverse=True)]
    return tree


def _parent(partition: Partition) -> int | None:
    if partition.starts_after is not None:
        return partition.starts_after
    return next(iter(partition.cursor_from), None)


def _edge(partition: Partition | None, added: Collection[int]) -> Text:
    if partition is None or _parent(partition) is None:
        return Text()
    if partition.starts_after is not None:
        given = " (--lineage)" if partition.id in added else ""
        return Text(f"after{given} ▸ ", style="blue")
    return Text("cursor ▸ ", style="magenta")
