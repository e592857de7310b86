"""What flows through the house: feed, partitions, events, batches, positions."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec
import orjson

from feedapi_client.errors import CommitOrderError

T = TypeVar("T")

DialectName = Literal["v1", "v2-draft", "v2-token"]
Status = Literal["open", "drained", "superseded"]
Decoder = Callable[[bytes], Any]

FIRST = "_first"
"""The special cursor before the oldest event."""
LAST = "_last"
"""The special cursor behind the newest event."""

_TYPED_DECODERS = 256

_load = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition as discovery lists it.

    `last_cursor` is the end of the partition at the time of the discovery; required by the specification when `closed`, often missing all the same.
    `starts_after` is the parent whose events come before this partition's (split method 1). `cursor_from` are the ancestors whose cursors are valid
    here, nearest first (split method 2).
    """

    id: int
    closed: bool = False
    last_cursor: str | None = None
    starts_after: int | None = None
    cursor_from: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FeedInfo:
    """A discovery: the dialect, the flags, and the partitions by id.

    `token` is None but in dialect ``v2-token``. `filters` are the names that ``filter-NAME`` may use.
    """

    dialect: DialectName
    partitions: dict[int, Partition]
    token: str | None = None
    exactly_once: bool = False
    stream: bool = False
    filters: tuple[str, ...] = ()


class EventOrigin:
    """What all events of one partition share. `load` is `decoder` for a payload that still lies in its page."""

    __slots__ = ("decoder", "load", "partition")

    def __init__(self, partition: int, decoder: Decoder = orjson.loads) -> None:
        self.partition = partition
        self.decoder = decoder
        # msgspec reads the page itself: for the small payloads that most events have, that takes 0.6 of the time that a copy for orjson does.
        self.load: Callable[[msgspec.Raw], Any] = (
            _load if decoder is orjson.loads else lambda payload: decoder(bytes(payload))
        )


_NOWHERE = EventOrigin(-1)


class Event(msgspec.Struct, gc=False, eq=False):
    """One event. Also the record that a line of NDJSON is decoded into, which is why it can be as cheap as it is: each dialect has a subclass that
    names the fields as its lines do.

    `_cursor` is set only on checkpoint lines, which never leave the decoder.
    """

    _payload: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw, name="data")
    _cursor: str | None = msgspec.field(default=None, name="cursor")
    _headers: dict[str, Any] | None = msgspec.field(default=None, name="\x7fheaders")
    _origin: EventOrigin = msgspec.field(default=_NOWHERE, name="\x7forigin")

    @property
    def partition(self) -> int:
        """The partition that the event was read from."""
        return self._origin.partition

    @property
    def raw(self) -> bytes:
        """The payload exactly as sent: a JSON object, or a JSON string with its quotes."""
        return bytes(self._payload)

    @property
    def headers(self) -> dict[str, Any]:
        """The event's headers (dialect v1, as far as `FetchOptions.v1_headers` asked for them); empty elsewhere."""
        return self._headers or {}

    def json(self) -> Any:
        """The payload, decoded by the consumer's `decoder`, and as orjson does unless told otherwise (but integers of any size are exact).

        Raises what the decoder raises: orjson.JSONDecodeError, a ValueError, for a payload that is no valid JSON.
        """
        origin = self._origin
        try:
            return origin.load(self._payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return origin.decoder(bytes(self._payload))

    def decode(self, type: type[T]) -> T:
        """The payload as a `type`: a msgspec Struct, dataclass, TypedDict, attrs class or builtin type, or a pydantic model.

        Raises msgspec.ValidationError (or pydantic's) when the payload does not fit.
        """
        validate: Callable[[bytes], T] | None = getattr(type, "model_validate_json", None)
        if validate is not None:
            return validate(bytes(self._payload))
        kind: Any = type
        decoder: msgspec.json.Decoder[T] = _typed_decoder(kind)
        return decoder.decode(self._payload)

    def __repr__(self) -> str:
        # Never the payload: events end up in log records.
        return f"<Event of partition {self._origin.partition}, {len(bytes(self._payload))} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (make_event, (self.partition, bytes(self._payload), self._headers))


@lru_cache(maxsize=_TYPED_DECODERS)
def _typed_decoder(type: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(type)


def make_event(
    partition: int,
    raw: bytes,
    headers: Mapping[str, Any] | None = None,
    *,
    decoder: Decoder = orjson.loads,
) -> Event:
    """An event from its parts, for tests and for code that carries events elsewhere. `raw` is JSON."""
    return Event(
        _payload=msgspec.Raw(raw),
        _headers=dict(headers) if headers else None,
        _origin=EventOrigin(partition, decoder),
    )


Committer = Callable[["Batch", Any], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Batch:
    """A run of events closed by a checkpoint.

    `cursor` resumes *after* the last event. A batch may hold no event: its cursor counts all the same.
    """

    partition: int
    events: Sequence[Event]
    cursor: str
    committer: Committer | None = field(default=None, repr=False)

    async def commit(self, transaction: Any = None) -> None:
        """Save the cursor; with `transaction`, as part of the caller's own transaction, so that cursor and effects stand or fall together.

        May be called again after the caller's transaction was rolled back. Raises `FencedError` when another consumer of the same name advanced the
        partition, `CommitOrderError` when a later batch of the partition was committed before or the iteration has ended, `StoreError` when the store
        failed. A cancelled commit is finished first (at most `Limits.commit_timeout`).
        """
        if self.committer is None:
            raise CommitOrderError(
                "the batch was fetched without a consumer: there is no cursor store to commit to",
                partition=self.partition,
            )
        await self.committer(self, transaction)

    def __len__(self) -> int:
        return len(self.events)

    def __bool__(self) -> bool:
        # A batch without events is still a batch.
        return True

    def __repr__(self) -> str:
        return f"<Batch of partition {self.partition}, {len(self.events)} events, cursor {self.cursor!r}>"


@dataclass(frozen=True, slots=True)
class Position:
    """Where a consumer stands in a partition.

    `cursor` resumes after the last event that was handled. `status` is ``drained`` when a closed partition was read to its end, ``superseded`` when its
    heirs took over the cursor. `revision` counts the saves of this position: a store accepts a position only when it holds the revision before it
    (none at all for the first, which is 1).
    """

    cursor: str
    status: Status = "open"
    revision: int = 1

    def advance(self, cursor: str | None = None, status: Status | None = None) -> Position:
        """The position after this one."""
        return Position(
            self.cursor if cursor is None else cursor,
            self.status if status is None else status,
            self.revision + 1,
        )


@dataclass(frozen=True, slots=True)
class FeedKey:
    """Whose cursors: the feed, the consumer's name, and the selection of events (a cursor is valid only for the identical set of filters).

    The key is safe to store and to print: `url` loses its credentials, its fragment and its query, which enters only as a digest.
    `filters` may be given as a mapping or as pairs; it is kept as sorted pairs.
    """

    url: str
    name: str = "default"
    filters: Any = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _key_url(self.url))
        pairs = self.filters.items() if isinstance(self.filters, Mapping) else (self.filters or ())
        object.__setattr__(
            self, "filters", tuple(sorted((str(name), str(value)) for name, value in pairs))
        )

    @property
    def id(self) -> str:
        """64 hexadecimal digits that stand for the whole key: what a store can use as a column of fixed width."""
        return hashlib.sha256(
            "\x00".join(
                [self.url, self.name, *(part for pair in self.filters for part in pair)]
            ).encode()
        ).hexdigest()

    def __str__(self) -> str:
        filters = "".join(f" {name}={value}" for name, value in self.filters)
        return f"{self.name} @ {self.url}{filters}"


_QUERY_MARK = "?sha256="


def public_url(url: str) -> str:
    """The URL without credentials, query and fragment: what messages and logs may show."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme.lower(), host.lower(), parts.path, "", ""))


def _key_url(url: str) -> str:
    query = urlsplit(url).query
    if not query:
        return public_url(url)
    if query.startswith(_QUERY_MARK[1:]):
        return public_url(url) + "?" + query  # a key made from another key's url stays the same
    return public_url(url) + _QUERY_MARK + hashlib.sha256(query.encode()).hexdigest()[:16]
