"""What the model's answers look like on the wire: discovery documents and pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import orjson

from feedapi_client.testing.simulator.world import (
    Dialect,
    ModelPartition,
    Published,
    Version,
    World,
)


def discovery(world: World, version: Version, at: float, *, stream: bool) -> bytes:
    """Return the discovery document of a version, as it was at a time."""
    document: dict[str, Any] = {
        "partitions": [_listed(world, partition, at) for partition in world.listed(at)],
        "exactlyOnce": True,
    }
    if stream:
        document["stream"] = True
    if version.dialect == "v2-token":
        document["token"] = version.token
    return orjson.dumps(document)


def _listed(world: World, partition: ModelPartition, at: float) -> dict[str, Any]:
    entry: dict[str, Any] = {"id": str(partition.id)}
    if partition.closed <= at:
        entry["closed"] = True
        if world.last_cursor:
            entry["lastCursor"] = partition.cursor(partition.end(at))
    if partition.starts_after is not None:
        entry["startsAfterPartition"] = str(partition.starts_after)
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
    """

    size: int = 20
    checkpoint_every: int = 4
    vary: bool = True


@dataclass(frozen=True, slots=True)
class ModelPage:
    """One page: its lines, and the number in its last cursor."""

    lines: list[bytes]
    events: int
    reached: int


def page(
    partition: ModelPartition,
    asked: int,
    at: float,
    dialect: Dialect,
    style: PageStyle,
    random: Random,
) -> ModelPage:
    """Return the page behind the event of number `asked`, as it was at a time."""
    visible = partition.events[: partition.visible(at)]
    unread = [event for event in visible if event.sequence > asked]
    size = random.randint(1, style.size) if style.vary else style.size
    sent, lines, reached = unread[:size], [], asked
    for group in _groups(sent, style, random):
        reached = max(event.sequence for event in group)
        lines += [_event_line(partition.id, event, dialect) for event in group]
        lines.append(_cursor_line(partition, reached, dialect))
    end = partition.end(at)
    if len(sent) == len(unread) and end > reached:
        reached = end
        lines.append(_cursor_line(partition, end, dialect))
    elif not lines:
        lines.append(_cursor_line(partition, asked, dialect))
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


def _event_line(partition: int, event: Published, dialect: Dialect) -> bytes:
    payload = {"entity": event.entity, "n": event.n}
    if dialect == "v1":
        return orjson.dumps({"partition": partition, "data": payload}) + b"\n"
    return orjson.dumps({"event" if dialect == "v2-draft" else "data": payload}) + b"\n"


def _cursor_line(partition: ModelPartition, sequence: int, dialect: Dialect) -> bytes:
    line: dict[str, Any] = {"cursor": partition.cursor(sequence)}
    if dialect == "v1":
        line = {"partition": partition.id, **line}
    return orjson.dumps(line) + b"\n"
