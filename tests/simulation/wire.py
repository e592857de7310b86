"""What the model's answers look like on the wire: discovery documents and pages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter
from random import Random
from typing import Any

import orjson

from tests.simulation.world import (
    Dialect,
    ModelPartition,
    Published,
    Version,
    World,
    is_selected,
)

_sequence = attrgetter("sequence")


def discovery(world: World, version: Version, at: float, *, stream: bool) -> bytes:
    """Return the discovery document of a version, as it was at a time."""
    manners, zero_edges = world.manners, version.dialect == "v2-token" and world.manners.zero_edges
    listed: list[Any] | None = [
        _listed(world, partition, at, zero_edges) for partition in world.listed(at)
    ]
    if at < manners.unlisted:
        listed = None if manners.null else []
    document: dict[str, Any] = {"partitions": listed, "exactlyOnce": True}
    if stream:
        document["stream"] = True
    if world.noisy:
        document["invented"] = [{"after": "this library was written"}]
    if version.dialect == "v2-token":
        document["token"] = version.token
    return orjson.dumps(document)


def _listed(world: World, partition: ModelPartition, at: float, zero_edges: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": str(partition.id)}
    if world.noisy:
        entry["invented"] = partition.id
    if partition.closed <= at:
        entry["closed"] = True
        if world.last_cursor:
            entry["lastCursor"] = partition.cursor(partition.end(at))
    parent = partition.starts_after
    forgotten = partition.forgotten or (parent == 0 and zero_edges)
    if parent is not None and not forgotten:
        # Publishers in the field send integers here.
        entry["startsAfterPartition"] = parent if world.noisy else str(parent)
    if partition.cursor_from:
        entry["cursorFromPartitions"] = [str(ancestor) for ancestor in partition.cursor_from]
    return entry


@dataclass(frozen=True, slots=True)
class PageStyle:
    """How the publisher cuts its pages.

    Attributes:
        size: events of a page.
        checkpoint_every: events between two checkpoints.
        vary: two requests from one cursor give different pages: other sizes, other checkpoints,
            events of different entities in another order.
        padding: bytes that are added to each event.
        read_bytes: how many bytes of a body arrive at once, at most.
    """

    size: int = 20
    checkpoint_every: int = 4
    vary: bool = True
    padding: int = 0
    read_bytes: int = 65_536


@dataclass(frozen=True, slots=True)
class ModelPage:
    """One page: its lines, and the number in its last cursor."""

    lines: list[bytes]
    events: int
    reached: int


def page(
    world: World,
    partition: ModelPartition,
    asked: int,
    at: float,
    dialect: Dialect,
    style: PageStyle,
    random: Random,
    *,
    selected: bool = False,
    echo: str = "",
) -> ModelPage:
    """Return the page behind the event of number `asked`, as it was at a time.

    Arguments:
        selected: the request selects events.
        echo: the cursor of the request, as it was sent.
    """
    events = partition.events
    at_end = not events or events[-1].sequence <= asked
    read = len(events) if at_end else bisect_right(events, asked, key=_sequence)
    unread = events[read : partition.visible(at)]
    if selected:
        unread = [event for event in unread if is_selected(event.entity)]
    cursor_line = partial(_cursor_line, partition, world=world, dialect=dialect, selected=selected)
    size = random.randint(1, style.size) if style.vary else style.size
    sent, lines, reached = unread[:size], [], asked
    empty, (key, cursor_key) = world.manners.empty, world.manners.keys(dialect)
    for group in _groups(sent, style, random):
        reached = max(event.sequence for event in group)
        lines += [
            _event_line(partition.id, event.entity, event.n, dialect, style.padding, key)
            for event in group
        ]
        lines.append(cursor_line(reached))
    end = world.end(partition, at)
    listed_end = world.last_cursor and not selected and partition.closed <= at
    if len(sent) == len(unread) and end > reached and (empty == "cursor" or listed_end):
        reached = end
        lines.append(cursor_line(end))
    elif not lines and empty == "cursor":
        lines.append(cursor_line(asked))
    elif not lines and empty == "echo":
        lines.append(line(partition.id, echo, dialect, cursor_key) if echo else cursor_line(asked))
    if world.noisy and lines and random.random() < 0.3:  # alone it would be what a gateway says
        lines.insert(random.randint(0, len(lines)), b'{"unknown":"command"}\n')
    return ModelPage(lines, len(sent), reached)


def _groups(events: list[Published], style: PageStyle, random: Random) -> Iterator[list[Published]]:
    """Cut the events of a page at its checkpoints."""
    while events:
        size = style.checkpoint_every
        size = random.randint(1, 2 * size) if style.vary else size
        group, events = events[:size], events[size:]
        yield _interleaved(group, random) if style.vary else group


def _interleaved(group: list[Published], random: Random) -> list[Published]:
    """Return the events in another order that keeps the order within each entity."""
    entities = [event.entity for event in group]
    random.shuffle(entities)
    waiting = {entity: iter([e for e in group if e.entity == entity]) for entity in entities}
    return [next(waiting[entity]) for entity in entities]


@lru_cache(4096)
def _event_line(
    partition: int, entity: int, n: int, dialect: Dialect, padding: int, key: str
) -> bytes:
    payload: dict[str, Any] = {"entity": entity, "n": n}
    if padding:
        payload["padding"] = "x" * padding
    if dialect == "v1":
        return orjson.dumps({"partition": partition, key: payload}) + b"\n"
    return orjson.dumps({key: payload}) + b"\n"


def _cursor_line(
    partition: ModelPartition, sequence: int, *, world: World, dialect: Dialect, selected: bool
) -> bytes:
    cursor = partition.selected_cursor(sequence) if selected else partition.cursor(sequence)
    return line(partition.id, cursor, dialect, world.manners.keys(dialect)[1])


def tail(
    world: World, partition: ModelPartition, end: int, dialect: Dialect, *, selected: bool
) -> bytes:
    """Return what a replica says that takes its own end for that of the partition."""
    return _cursor_line(partition, end, world=world, dialect=dialect, selected=selected)


def line(partition: int, cursor: str, dialect: Dialect, key: str) -> bytes:
    """Return the line of a cursor."""
    if dialect == "v1":
        return f'{{"partition":{partition},"{key}":"{cursor}"}}\n'.encode()
    return f'{{"{key}":"{cursor}"}}\n'.encode()
