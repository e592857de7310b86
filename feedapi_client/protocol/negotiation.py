"""Discovery: from the response to an argument-less GET to a `FeedInfo` (R1, R12 for fields)."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections import Counter
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec

from feedapi_client.errors import FeedError, LineageError, NegotiationError, ProtocolError
from feedapi_client.model import MAX_PARTITION, FeedInfo, Partition
from feedapi_client.protocol.text import are_valid, excerpt, hidden, problem

# Ancestors that a discovery may list, of all partitions. There are 7 of each in the tree of
# 32,767 partitions that split in two, where each leaf lists its way to the root.
MOST_EDGES = 8 * (MAX_PARTITION + 1)
# What msgspec's errors end with: a field of the discovery, or of one of its partitions.
_PLACE = re.compile(r"(.*) - at `\$\.(\w+)(?:\[(\d+)\](?:\.(\w+)(?:\[\d+\])?)?)?`")
Id = int | str


class _Any(msgspec.Struct, gc=False): ...


class _Identified(msgspec.Struct, gc=False):
    id: Id


class _Listed(_Identified, rename="camel", gc=False):
    closed: bool | None = None
    last_cursor: str | None = None
    starts_after_partition: Id | None = None
    starts_after_parent: Id | None = None
    cursor_from_partitions: list[Id] | None = None
    split_from_ancestors: list[Id] | None = None


class _Counted(msgspec.Struct):
    partitions: list[_Any] | None


class _Listing(msgspec.Struct):
    partitions: list[msgspec.Raw] | None


class _Document(msgspec.Struct, rename="camel"):
    partitions: list[_Listed] | None  # as Go encodes a slice that nothing was ever added to
    token: str | None = None
    exactly_once: bool | _Any | None = None  # an object has more information, which nobody reads
    stream: bool | _Any | None = None
    filters: list[str] | None = None


_read_document = msgspec.json.Decoder(_Document).decode
_read_counted = msgspec.json.Decoder(_Counted).decode
_read_listing = msgspec.json.Decoder(_Listing).decode
_read_identified = msgspec.json.Decoder(_Identified).decode


def check_v1_partitions(v1_partitions: int | None) -> None:
    """Raise ValueError unless it is None or a possible number of partitions."""
    if v1_partitions is not None and (
        type(v1_partitions) is not int or not 1 <= v1_partitions <= MAX_PARTITION + 1
    ):
        raise ValueError(
            f"v1_partitions must be a number from 1 to {MAX_PARTITION + 1}, not {v1_partitions!r}"
        )


def negotiate(status: int, body: bytes, *, feed: str, v1_partitions: int | None = None) -> FeedInfo:
    """Return what the feed is, by its response to an argument-less GET. Redirects and what the
    transport deals with (401, 403, and statuses that are retried) don't come here. Raises
    `NegotiationError`: this is no feed, or a v1 feed without `v1_partitions`; `ProtocolError`: a
    field of the discovery has a wrong type; `LineageError`: a partition's id or lineage is
    impossible; ValueError for an impossible `v1_partitions`.
    """
    check_v1_partitions(v1_partitions)
    if status == 400:
        if v1_partitions is not None:
            return FeedInfo("v1", {id: Partition(id) for id in range(v1_partitions)})
        raise NegotiationError(
            "the feed answers 400 to discovery, as a ZeroEventHub (v1) feed does: give "
            "v1_partitions, the number of partitions that its publisher documents "
            "(FeedConsumer(url, v1_partitions=4)), or check the URL if it is not one: "
            f"'{excerpt(body)}'",
            feed=feed,
        )
    what = ""
    if status == 200:
        try:
            body.decode()  # in what it skips, msgspec does not look for bytes that are not UTF-8
            return _info(body.removeprefix(BOM_UTF8))
        except FeedError as error:
            error.feed = feed
            raise
        except msgspec.ValidationError:
            what = " with JSON that lists no partitions"
        except (ValueError, RecursionError):
            what = " with a body that is not JSON"
    raise NegotiationError(
        f"no feed answers here: status {status}{what}: '{excerpt(body)}'. Check the URL", feed=feed
    )


def _info(body: bytes) -> FeedInfo:
    """Raises `FeedError`, and what msgspec raises where it is no discovery."""
    if len(body) > len(b'{"id":0},') * MAX_PARTITION:
        with suppress(msgspec.ValidationError):  # which is told below
            if (count := len(_read_counted(body).partitions or ())) > MAX_PARTITION + 1:
                wrong = f"the discovery lists {count} partitions, of {MAX_PARTITION + 1}"
                raise LineageError(f"{wrong} that there can be")
    try:
        found = _read_document(body)
    except msgspec.ValidationError as error:
        raise _of_field(error, body) from error
    _check_cursor("token", found.token)
    return FeedInfo(
        dialect="v2-draft" if found.token is None else "v2-token",
        partitions=_partitions(found.partitions or []),
        token=found.token,
        exactly_once=found.exactly_once not in (None, False),
        stream=found.stream not in (None, False),
        filters=tuple(found.filters or ()),
    )


def _of_field(error: msgspec.ValidationError, body: bytes) -> Exception:
    """Return the error for a wrong field. Raises where the document is no discovery at all."""
    listed = _read_listing(body).partitions or []
    place = _PLACE.fullmatch(str(error))
    if place is None:
        return error
    wrong, name, index, field = place.groups()
    if name != "partitions":
        return ProtocolError(f"{name} in the discovery: {wrong}")
    if field in (None, "id"):
        return _no_id(int(index), wrong)
    try:
        id = partition_id(_read_identified(listed[int(index)]).id)
    except msgspec.ValidationError:
        id = None  # it has none
    kind = ProtocolError if field in ("closed", "lastCursor") else LineageError
    return kind(f"{field} in the discovery: {wrong}", partition=id)


def _partitions(entries: list[_Listed]) -> dict[int, Partition]:
    ids = _numbers([entry.id for entry in entries])
    if ids is None:
        at = next(at for at, each in enumerate(entries) if partition_id(each.id) is None)
        raise _no_id(at, f"it has the id {_shown(entries[at].id)}")
    partitions = dict(zip(ids, map(_without_fields, ids), strict=True))
    if len(partitions) < len(ids):
        twice = next(id for id, times in Counter(ids).items() if times > 1)
        raise LineageError(f"the discovery lists partition {twice} twice", partition=twice)
    # An early Go version writes a 0, as a number, where there is no parent. It shows where
    # partition 0 starts after itself; then no other 0 can be trusted either.
    zero = 0 in partitions and entries[ids.index(0)].starts_after_partition == 0
    edges = 0
    for id, entry in zip(ids, entries, strict=True):
        if entry == _Listed(entry.id):
            continue
        given = entry.cursor_from_partitions or entry.split_from_ancestors or []
        above = entry.starts_after_partition
        above = entry.starts_after_parent if above is None else above
        older = (entry.split_from_ancestors, given), (entry.starts_after_parent, above)
        # To guess which of two counts could bring a whole history again.
        if any(old not in (None, new) for old, new in older):
            wrong = "the discovery gives its lineage in the older spelling too, and they differ"
            raise LineageError(wrong, partition=id)
        edges += len(given)
        if edges > MOST_EDGES:
            raise LineageError(f"the discovery lists more than {MOST_EDGES} ancestors")
        _check_cursor("lastCursor", entry.last_cursor, id)
        parent = None if above is None else _number(id, "startsAfterPartition", above)
        if zero and parent == 0:
            parent = None
        ancestors = _numbers(given)
        if ancestors is None:
            ancestors = [_number(id, "cursorFromPartitions", each) for each in given]
        closed, end = bool(entry.closed), entry.last_cursor or None
        partitions[id] = Partition(id, closed, end, parent, tuple(ancestors))
    return partitions


def _number(id: int, name: str, value: Id) -> int:
    number = partition_id(value)
    if number is None:
        wrong = f"{name} in the discovery: {_shown(value)} is no partition's id (0 to 32767)"
        raise LineageError(wrong, partition=id)
    return number


def _no_id(index: int, wrong: str) -> FeedError:
    wrong = f"partitions[{index}] in the discovery: {wrong}"
    return LineageError(f"{wrong}; an id is an integer from 0 to {MAX_PARTITION}")


def _check_cursor(name: str, value: str | None, partition: int | None = None) -> None:
    """Refuse what can't be stored or sent (R18)."""
    if value and not are_valid(value):
        raise ProtocolError(f"{name} in the discovery is {problem(value)}", partition=partition)


@cache
def _without_fields(id: int) -> Partition:
    """Return the partition of which a discovery says no more than its id. Most are listed so, and
    again in each discovery; to make one takes a microsecond.
    """
    return Partition(id)


def _numbers(ids: list[Id]) -> list[int] | None:
    """Return all ids as numbers; None if one is no id. All at once: one by one it takes twice as
    long, and a feed may list 32,768.
    """
    texts = [id for id in ids if type(id) is str]
    digits = "".join(texts)
    lengths = set(map(len, texts))
    if texts and not (digits.isascii() and digits.isdigit() and lengths <= {1, 2, 3, 4, 5}):
        return None
    numbers = list(map(int, ids))
    return numbers if not numbers or 0 <= min(numbers) <= max(numbers) <= MAX_PARTITION else None


def partition_id(value: Any) -> int | None:
    """Return a partition's id, sent as a string or an integer; None for anything else."""
    if type(value) is str and len(value) <= 5 and value.isascii() and value.isdigit():
        value = int(value)
    return value if type(value) is int and 0 <= value <= MAX_PARTITION else None


def _shown(value: Id) -> str:
    if isinstance(value, int) and abs(value) < 1 << 64:
        return str(value)
    return ascii(hidden(str(value))[:40])
