"""States as bytes: small and fast, because millions of them are written and read.

What never changes, or does not matter to how a state behaves, is left out.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from feedapi_client.lineage.graph import Graph, PublisherEdges
from feedapi_client.model import Position
from feedapi_client.protocol.page import Progress
from feedapi_client.runtime.handling import Handling
from feedapi_client.runtime.trouble import Trouble
from tests.exploration.feeds import Feed
from tests.exploration.instance import NOTHING

_GRAPHS: dict[tuple[str, int], Graph] = {}
_NAMES: dict[int, tuple[str, int]] = {}
_POSITIONS: dict[tuple[Any, ...], Position] = {}


def shared_graph(feed: Feed, version: int, graph: Graph) -> Graph:
    """Return the one graph of a topology. Graphs are not changed."""
    found = _GRAPHS.setdefault((feed.name, version), graph)
    _NAMES[id(found)] = (feed.name, version)
    return found


def _graph(name: str, version: int) -> Graph:
    return _GRAPHS[name, version]


def _new_graph() -> Graph:
    return Graph({})


def _reduce_graph(graph: Graph) -> tuple[Any, ...]:
    name = _NAMES.get(id(graph))
    return (_new_graph, ()) if name is None else (_graph, name)


def _position(*fields: Any) -> Position:
    if fields not in _POSITIONS:
        _POSITIONS[fields] = Position(*fields)
    return _POSITIONS[fields]


def _reduce_position(position: Position) -> tuple[Any, ...]:
    return (_position, (position.cursor, position.status, position.revision, position.replaces))


def _trouble(refused: bool) -> Trouble:
    nothing: Any = NOTHING
    trouble = Trouble(nothing, nothing)
    trouble.refused = refused
    return trouble


def _edges() -> PublisherEdges:
    return PublisherEdges({}, ordered=True, feed="model")


def _progress() -> Progress:
    return Progress(10)


class _Pickler(pickle.Pickler):
    dispatch_table = {  # noqa: RUF012
        Graph: _reduce_graph,
        Position: _reduce_position,
        Trouble: lambda trouble: (_trouble, (trouble.refused,)),
        Handling: lambda _: (Handling, ()),
        PublisherEdges: lambda _: (_edges, ()),
        Progress: lambda _: (_progress, ()),
    }


def dumped(world: Any) -> bytes:
    """Return a state as bytes."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(world)
    return buffer.getvalue()
