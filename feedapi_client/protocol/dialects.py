"""The three dialects: how a fetch looks in each, and what its lines hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from feedapi_client.errors import ProtocolError
from feedapi_client.model import NO_PAYLOAD, DialectName, Event, FeedInfo
from feedapi_client.options import FetchOptions
from feedapi_client.protocol.text import quoted

Params = list[tuple[str, str]]


class V1Line(Event, gc=False, eq=False):
    """``{"partition":2,"headers":{…},"data":…}`` and ``{"partition":2,"cursor":"…"}``."""

    _payload: msgspec.Raw = msgspec.field(default=NO_PAYLOAD, name="data")
    _headers: msgspec.Raw = msgspec.field(default=None, name="headers")  # type: ignore[assignment]
    _line_partition: int | str | None = msgspec.field(default=None, name="partition")


class DraftLine(Event, gc=False, eq=False):
    """``{"event":…}`` and ``{"cursor":"…"}``."""

    _payload: msgspec.Raw = msgspec.field(default=NO_PAYLOAD, name="event")


class TokenLine(Event, gc=False, eq=False):
    """``{"data":…}`` and ``{"cursor":"…"}``."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """A row of the table `DIALECTS`. `line` is what a line is decoded into, `suffix` follows the
    feed's path in a fetch, `address` gives the parameters that say which partition and cursor,
    `select` those that say which events.
    """

    name: DialectName
    line: type[Event]
    payload_key: str
    suffix: str
    page_size: str
    address: Callable[[FeedInfo, int, str], Params]
    select: Callable[[FetchOptions], Params]
    names_partition: bool = False
    event_types: bool = False
    filters: bool = False

    def fetch_params(
        self,
        info: FeedInfo,
        partition: int,
        cursor: str,
        options: FetchOptions,
        *,
        stream: bool | int = False,
    ) -> Params:
        """Return the query of a fetch, not encoded yet. `stream` (True, or milliseconds) asks for a
        response that stays open; where the feed offers none, a page is asked for.
        """
        params = self.address(info, partition, cursor)
        if stream is not False and info.stream:
            params.append(("stream", "y" if stream is True else str(stream)))
        elif options.page_size_hint is not None:
            params.append((self.page_size, str(options.page_size_hint)))
        return params + self.select(options)


def _type_params(options: FetchOptions) -> Params:
    selections = (
        ("event-types", options.event_types),
        ("skip-event-types", options.skip_event_types),
    )
    return [(name, ";".join(types)) for name, types in selections if types]


_ROWS = (
    Dialect(
        name="v1",
        line=V1Line,
        payload_key="data",
        suffix="",
        page_size="pagesizehint",
        address=lambda info, partition, cursor: [
            ("n", str(len(info.partitions))),
            (f"cursor{partition}", cursor),
        ],
        select=lambda options: (
            [("headers", ",".join(options.v1_headers))] if options.v1_headers else []
        ),
        names_partition=True,
    ),
    Dialect(
        name="v2-draft",
        line=DraftLine,
        payload_key="event",
        suffix="",
        page_size="pageSizeHint",
        address=lambda _, partition, cursor: [("partition", str(partition)), ("cursor", cursor)],
        select=lambda options: [(f"filter-{key}", text) for key, text in options.filters.items()],
        filters=True,
    ),
    Dialect(
        name="v2-token",
        line=TokenLine,
        payload_key="data",
        suffix="/events",
        page_size="pagesizehint",
        address=lambda info, partition, cursor: [
            ("token", info.token or ""),
            ("partition", str(partition)),
            ("cursor", cursor),
        ],
        select=_type_params,
        event_types=True,
    ),
)
DIALECTS: dict[DialectName, Dialect] = {row.name: row for row in _ROWS}


def check_options(info: FeedInfo, options: FetchOptions, *, feed: str) -> None:
    """Raise `ProtocolError` when the feed can't carry the selection of events: it would send other
    events than those.
    """
    dialect, by_type = DIALECTS[info.dialect], options.event_types or options.skip_event_types
    if by_type and not dialect.event_types:
        wrong = "event_types and skip_event_types need a feed of dialect v2-token"
    elif options.filters and not dialect.filters:
        wrong = "filters need a feed of dialect v2-draft"
    elif unknown := ", ".join(sorted(options.filters.keys() - set(info.filters))):
        wrong = f"the feed does not offer filter '{quoted(unknown)}'"
    else:
        return
    offers = f", with filters {quoted(', '.join(info.filters))}" if info.filters else ""
    text = f"{wrong}. It speaks {info.dialect}{offers}: select in the application instead"
    raise ProtocolError(text, feed=feed)
