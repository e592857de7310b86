"""The data that all layers share: feed, partitions, events, batches, positions."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload
from urllib.parse import SplitResult, urlsplit, urlunsplit

import msgspec
import orjson

from feedapi_client.errors import CommitOrderError, NegotiationError

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    Payload = TypeVarWithDefault("Payload", default=Any)
else:
    Payload = TypeVar("Payload")  # a default needs Python 3.13

T = TypeVar("T")

DialectName = Literal["v1", "v2-draft", "v2-token"]
Status = Literal["open", "drained", "superseded"]
StartAt = Literal["first", "last"] | Mapping[int, str]
Decoder = Callable[[bytes], Any]

__version__ = "0.1.0"

_STEP_BITS = 20
MAX_PARTITION = 32767
"""The largest id of a partition."""

FIRST = "_first"
"""The special cursor before the oldest event."""
LAST = "_last"
"""The special cursor after the newest event."""

_TYPED_DECODERS = 256  # types whose decoders are kept
_KEYS = 64  # feeds whose keys' URLs are kept: a process makes the same few keys again and again

_load = msgspec.json.Decoder().decode
_load_headers = msgspec.json.Decoder(dict[str, Any] | None).decode
_HEX = rb"[0-9a-fA-F]{2}"
_HIGH, _LOW = rb"\\u[dD][89abAB]" + _HEX, rb"\\u[dD][c-fC-F]" + _HEX
_LONE = re.compile(_HIGH + b"(?!" + _LOW + b")|" + _LOW + b"(?<!" + _HIGH + b".{6})")


def draw_step() -> int:
    """Draw by how much a revision is larger than the one that it replaces.

    By the operating system: what a process draws by itself, its copy (a fork, a snapshot of its
    machine that is restored twice) draws again.
    """
    return 1 + secrets.randbits(_STEP_BITS)


def without_lone_surrogates(data: bytes) -> bytes:
    """Return JSON in which escapes of surrogates without a partner are ``\\ufffd``.

    JSON's grammar allows them, and no UTF-8 text can hold what they mean: msgspec and orjson
    refuse them. U+FFFD is what Go's decoder makes of them. The length stays the same.
    """
    if b"\\u" not in data or b"\0" in data:  # which no JSON holds
        return data
    # Without escaped backslashes each one that is left begins an escape.
    mended = _LONE.sub(rb"\\ufffd", data.replace(rb"\\", b"\0\0"))
    return mended.replace(b"\0\0", rb"\\")


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition as discovery lists it.

    Attributes:
        id: from 0 to 32767.
        closed: whether no more events will be added.
        last_cursor: the end of the partition at the time of the discovery. The specification
            requires it when `closed`, but publishers often leave it out.
        starts_after: the parent, whose events come before those of this partition (split method 1).
        cursor_from: the ancestors whose cursors are valid here, nearest first (split method 2).
    """

    id: int
    closed: bool = False
    last_cursor: str | None = None
    starts_after: int | None = None
    cursor_from: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FeedInfo:
    """The result of a discovery.

    Attributes:
        dialect: what the feed speaks.
        partitions: the listed partitions by id.
        token: what each fetch has to send in dialect ``v2-token``; None in the others.
        exactly_once: whether the publisher says that it never repeats an event.
        stream: whether the publisher offers responses that stay open.
        filters: the names that ``filter-NAME`` parameters may use.
    """

    dialect: DialectName
    partitions: dict[int, Partition]
    token: str | None = None
    exactly_once: bool = False
    stream: bool = False
    filters: tuple[str, ...] = ()


class EventOrigin:
    """What all events of one response share: their partition, and how a payload is decoded.

    `load` does the same as `decoder`, but takes the payload without copying it out of its page.
    """

    __slots__ = ("decoder", "load", "partition")

    def __init__(self, partition: int, decoder: Decoder = orjson.loads) -> None:
        self.partition = partition
        self.decoder = decoder
        # msgspec reads from the page itself. For small payloads, which most events have, that takes
        # 0.6 of the time that a copy and orjson take.
        self.load: Callable[[msgspec.Raw], Any] = (
            _load if decoder is orjson.loads else lambda payload: decoder(bytes(payload))
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EventOrigin) or type(other) is not type(self):
            return NotImplemented
        return self.partition == other.partition and self.decoder is other.decoder

    def __hash__(self) -> int:  # of any decoder, also of one that has no hash
        return hash((self.partition, id(self.decoder)))

    def done(self, transaction: Any) -> Awaitable[None]:  # noqa: ARG002
        """Do `Event.done`."""
        raise CommitOrderError(
            "the event can't be done: that is for a handler of run_by_key(event_id=...), while it "
            "handles the event",
            partition=self.partition,
        )


_NOWHERE = EventOrigin(-1)
NO_PAYLOAD = msgspec.Raw()
Remember = Callable[[Any], Awaitable[None]]
"""Remembers in a transaction that one event is done."""


class HandledOrigin(EventOrigin):
    """The origin of one event while it is handled by key."""

    __slots__ = ("remember",)

    def __init__(self, origin: EventOrigin, remember: Remember) -> None:
        self.partition, self.decoder, self.load = origin.partition, origin.decoder, origin.load
        self.remember = remember

    def done(self, transaction: Any) -> Awaitable[None]:
        """Do `Event.done`."""
        return self.remember(transaction)


class Event(msgspec.Struct, Generic[Payload], gc=False, eq=False):
    """One event.

    Generic over what `json` returns, which the `decoder` of the consumer decides.

    It is also the record that a line of a response is decoded into, so that no second object is
    created for an event. Each dialect has a subclass that names the fields as its lines do.
    """

    # `_cursor` is set only on checkpoint lines, which never leave the decoder. Names that begin
    # with DEL are fields that no line may set.
    # A factory for the payload takes five times as long as one object for all.
    _payload: msgspec.Raw = msgspec.field(default=NO_PAYLOAD, name="data")
    _cursor: str | None = msgspec.field(default=None, name="cursor")
    _headers: Any = msgspec.field(default=None, name="\x7fheaders")
    _origin: EventOrigin = msgspec.field(default=_NOWHERE, name="\x7forigin")

    @property
    def partition(self) -> int:
        """The partition that the event was read from."""
        return self._origin.partition

    @property
    def raw(self) -> bytes:
        """The payload as the publisher sent it: a JSON object, or a JSON string with its quotes.

        Its bytes may be invalid UTF-8, or hold the escape of a surrogate without a partner.
        """
        return b"" + self._payload  # half the time of bytes()

    @property
    def headers(self) -> dict[str, Any]:
        """The event's headers in dialect v1, those that `FetchOptions.v1_headers` asked for.

        Empty in the other dialects. Raises ValueError for a number or a depth that can't be read.
        """
        if isinstance(self._headers, msgspec.Raw):  # it takes many times as much when decoded
            try:
                self._headers = _load_headers(self._headers)
            except (ValueError, RecursionError):
                self._headers = orjson.loads(without_lone_surrogates(bytes(self._headers)))
        return self._headers or {}

    def json(self) -> Payload:
        """Return the payload, decoded by the `decoder` of the consumer.

        Without a decoder of the consumer's own the result is what orjson gives, except that
        integers of any size are exact, and that the escape of a surrogate without a partner is
        U+FFFD.

        Raises:
            ValueError: the payload is not valid JSON, not valid UTF-8, or nested more deeply than
                1,024 levels (orjson.JSONDecodeError).
                A decoder of the consumer's own may raise what it likes.
        """
        origin = self._origin
        try:
            return origin.load(self._payload)  # type: ignore[no-any-return]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            payload = bytes(self._payload)
            if origin.decoder is orjson.loads:
                payload = without_lone_surrogates(payload)
            return origin.decoder(payload)  # type: ignore[no-any-return]

    @overload
    def decode(self, type: type[T]) -> T: ...
    @overload
    def decode(self, type: Any) -> Any: ...
    def decode(self, type: Any) -> Any:
        """Return the payload as a `type`. What `json` does with a lone surrogate holds here too.

        Arguments:
            type: a msgspec Struct, a dataclass, a TypedDict, an attrs class, a builtin type, a
                pydantic model, or a union of such (but of pydantic models). For a union, a type
                checker does not know the type of the result.

        Raises:
            msgspec.ValidationError: the payload does not fit the type. For a pydantic model it is
                pydantic.ValidationError.
        """
        validate: Callable[[bytes], Any] | None = getattr(type, "model_validate_json", None)
        if validate is not None:
            return validate(without_lone_surrogates(bytes(self._payload)))
        decoder: msgspec.json.Decoder[Any] = _typed_decoder(type)
        try:
            return decoder.decode(self._payload)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            return decoder.decode(without_lone_surrogates(bytes(self._payload)))

    def done(self, transaction: Any = None) -> Awaitable[None]:
        """Remember that this event is done, although earlier ones of its partition may not be.

        For handlers of `FeedConsumer.run_by_key` with `event_id`, which await it as their last
        step. In a handler of `SyncFeedConsumer` the call itself does it.

        Arguments:
            transaction: the caller's own transaction, which has the effects of the event, as
                `Batch.commit` takes it. None: the store remembers at once.

        Raises:
            AlreadyDoneError: it is done already. Roll the transaction back, and let this through.
            LeaseLostError, FencedError: another instance or consumer reads the partition now.
                Likewise.
            CommitOrderError: it is not being handled with `event_id`.
            StoreError: the store failed.
        """
        return self._origin.done(transaction)

    def __repr__(self) -> str:
        # Never the payload, because events end up in log records (R19).
        return f"<Event of partition {self._origin.partition}, {len(bytes(self._payload))} bytes>"

    def __reduce__(self) -> tuple[Any, ...]:
        return (make_event, (self.partition, bytes(self._payload), self.headers or None))


@contextmanager
def being_handled(event: Event, remember: Remember) -> Iterator[None]:
    """Let `Event.done` of an event call this function, within the block."""
    before = event._origin
    event._origin = within = HandledOrigin(before, remember)
    try:
        yield
    finally:
        if event._origin is within:  # and not of a thread that was left behind
            event._origin = before


def remembers(event: Event) -> Remember | None:
    """Return what `Event.done` of the event calls, while it is handled with `event_id`."""
    origin = event._origin
    return origin.remember if isinstance(origin, HandledOrigin) else None


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
    """Create an event from its parts, for tests and for code that moves events elsewhere.

    Arguments:
        partition: the partition that it belongs to.
        raw: the payload as JSON.
        headers: as in dialect v1.
        decoder: what `Event.json` uses.
    """
    return Event(
        _payload=msgspec.Raw(raw),
        _headers=dict(headers) if headers else None,
        _origin=EventOrigin(partition, decoder),
    )


Committer = Callable[["Batch[Any]", Any], Awaitable[None]]


@dataclass(slots=True, eq=False)
class Batch(Generic[Payload]):
    """Events closed by a checkpoint.

    Iterating over a batch gives its events, and its length is their number.

    A batch may hold no event. Its cursor has to be committed all the same, so a batch is always
    true.

    Attributes:
        partition: the partition of all its events.
        events: the events, oldest first.
        cursor: resumes *after* the last of the events.
        committer: saves the cursor; None for a batch that was fetched without a consumer.
    """

    partition: int
    events: Sequence[Event[Payload]]
    cursor: str
    committer: Committer | None = field(default=None, repr=False)

    async def commit(self, transaction: Any = None) -> None:
        """Save the cursor.

        May be called again after the caller's transaction was rolled back, before the next batch is
        asked for: to ask says that the transaction was committed.

        Arguments:
            transaction: the caller's own transaction. The cursor is then saved as a part of it, so
                that the cursor and the caller's effects are committed together or not at all.

        Raises:
            FencedError: another consumer of the same name advanced the partition.
            CommitOrderError: this batch or a later one of the partition was committed before, or
                the iteration has ended.
            StoreError: the store failed.

        Cancellation: a save that has begun is finished first, for at most `Limits.commit_timeout`.
        """
        if self.committer is None:
            raise CommitOrderError(
                "the batch was fetched without a consumer: there is no cursor store to commit to",
                partition=self.partition,
            )
        await self.committer(self, transaction)

    def __iter__(self) -> Iterator[Event[Payload]]:
        """Iterate over the events."""
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __bool__(self) -> bool:
        return True  # even without events

    def __repr__(self) -> str:
        return (
            f"<Batch of partition {self.partition}, {len(self.events)} events, "
            f"cursor {self.cursor!r}>"
        )


@dataclass(frozen=True, slots=True)
class Reached:
    """How far somebody else has read a partition: what `read` of `FeedConsumer.delegate` returns.

    Attributes:
        cursor: resumes after the last event that was read. The cursor that `read` was given says
            that nothing was.
        more: events are known to follow.
    """

    cursor: str
    more: bool = False


@dataclass(frozen=True, slots=True)
class Position:
    """How far a consumer has read a partition.

    Attributes:
        cursor: resumes after the last event that was handled.
        status: ``drained`` when a closed partition was read to its end, ``superseded`` when the
            cursor was transferred to its successors, otherwise ``open``.
        revision: tells this save of the position from all others. It is drawn: see `after`.
        replaces: the revision of the position that this one replaces; None: nothing is stored. A
            store accepts a position only when it holds that very revision. It is not stored, and
            does not count when positions are compared.
    """

    cursor: str
    status: Status = "open"
    revision: int = 1
    replaces: int | None = field(default=None, compare=False)

    @classmethod
    def after(cls, stored: Position | None, cursor: str, status: Status = "open") -> Position:
        """Return a position that replaces the `stored` one; None: nothing is stored.

        Its revision is larger by a random step of 1 to 2**20. After a database went back, two
        consumers may save on the same position: their revisions are not the same.
        """
        return position_after(stored, cursor, status, step=draw_step())

    def advance(self, cursor: str | None = None, status: Status | None = None) -> Position:
        """Return a position that replaces this one, with the other fields as given."""
        return Position.after(
            self,
            self.cursor if cursor is None else cursor,
            self.status if status is None else status,
        )


def position_after(
    stored: Position | None, cursor: str, status: Status = "open", *, step: int
) -> Position:
    """Return what `Position.after` does. One step may serve all positions of a save.

    Each position is compared with nothing but the stored one of its own partition.
    """
    replaces = None if stored is None else stored.revision
    return Position(cursor, status, (replaces or 0) + step, replaces)


@dataclass(frozen=True, slots=True)
class FeedKey:
    """Identifies whose cursors these are: of which feed, consumer and selection of events.

    The key is safe to store and to print.

    Attributes:
        url: the feed's URL. It loses its credentials, its fragment and its query; of the query a
            digest is kept, as a fragment: ``https://host/feed#sha256=0123456789abcdef``. No query
            can pass for that, and the `url` of a key makes the same key again.
        name: the consumer's name.
        filters: the selection of events, because a cursor is valid only for the same filters. Given
            as a mapping or as pairs, kept as sorted pairs.

    A feed that has a name of its own (``feed_name``) is ``feed:NAME`` in place of its URL: see
    `named`.

    Raises:
        NegotiationError: no feed can be at this URL.
    """

    url: str
    name: str = "default"
    filters: Any = ()

    @classmethod
    def named(cls, feed_name: str, name: str = "default", filters: Any = ()) -> FeedKey:
        """Return the key of a feed by its name, under which it may move from URL to URL.

        Raises:
            ValueError: the name is empty, too long, or not printable.
        """
        return cls(f"{_NAMED}{checked_feed_name(feed_name)}", name, filters)

    @property
    def feed_name(self) -> str | None:
        """The feed's name; None for a key by URL."""
        return self.url.removeprefix(_NAMED) if self.url.startswith(_NAMED) else None

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", _key_url(self.url))
        pairs = self.filters.items() if isinstance(self.filters, Mapping) else (self.filters or ())
        object.__setattr__(
            self, "filters", tuple(sorted((str(name), str(value)) for name, value in pairs))
        )

    @property
    def id(self) -> str:
        """64 hexadecimal digits that identify the key, for stores that need a fixed width."""
        return _digest(self)

    def __str__(self) -> str:
        filters = "".join(f" {name}={value}" for name, value in self.filters)
        return f"{self.name} @ {self.url}{filters}"


@lru_cache(_KEYS)
def _digest(key: FeedKey) -> str:
    digest = hashlib.sha256()
    for part in (key.url, key.name, *(part for pair in key.filters for part in pair)):
        encoded = part.encode("utf-8", "surrogatepass")
        # With its length before it no part can be taken for two, nor two for one.
        digest.update(b"%d:%b" % (len(encoded), encoded))
    return digest.hexdigest()


_NAMED = "feed:"
_LONGEST_NAME = 200


def checked_feed_name(name: str) -> str:
    """Return the name. Raises ValueError for one that no feed can have."""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise ValueError(f"feed_name is a text of 1 to {_LONGEST_NAME} characters")
    if not name.isprintable() or name != name.strip():
        raise ValueError("feed_name is printable, and neither begins nor ends with a space")
    return name


_DIGEST = re.compile("sha256=[0-9a-f]{16}")


def public_url(url: str) -> str:
    """Return the URL without credentials, query and fragment, as messages and logs may show it.

    Raises `NegotiationError` for a text that is no http or https URL. The error quotes none of it,
    because any part may be a part of a password.
    """
    parts = _split(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme.lower(), host.lower(), parts.path, "", ""))


def _key_url(url: str) -> str:
    if isinstance(url, str) and url.startswith(_NAMED):
        try:
            return f"{_NAMED}{checked_feed_name(url.removeprefix(_NAMED))}"
        except ValueError as error:
            raise NegotiationError(str(error)) from None
    # What is no string may not be hashable, and is refused.
    return _read_key_url(url) if isinstance(url, str) else public_url(url)


@lru_cache(_KEYS)
def _read_key_url(url: str) -> str:
    parts = _split(url)
    if parts.query:
        digest = hashlib.sha256(parts.query.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return f"{public_url(url)}#sha256={digest}"
    if _DIGEST.fullmatch(parts.fragment):
        return f"{public_url(url)}#{parts.fragment}"  # the `url` of another key stays as it is
    return public_url(url)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except (TypeError, ValueError, AttributeError):
        pass  # not chained: the reason may quote a part of a password
    raise NegotiationError("the feed's URL must begin with http:// or https:// and name a host")
