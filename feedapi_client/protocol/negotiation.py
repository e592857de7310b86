"""Discovery: from the response to an argument-less GET to a `FeedInfo` (R1, R12 for fields)."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import orjson

from feedapi_client.errors import FeedError, LineageError, NegotiationError, ProtocolError
from feedapi_client.model import MAX_PARTITION, FeedInfo, Partition
from feedapi_client.protocol import cursors
from feedapi_client.protocol.text import excerpt

_SPELLINGS = (
    ("startsAfterPartition", "startsAfterParent"),
    ("cursorFromPartitions", "splitFromAncestors"),
)


def check_v1_partitions(v1_partitions: int | None) -> None:
    """Raise ValueError unless it is None or a possible number of partitions."""
    if v1_partitions is None:
        return
    if (
        isinstance(v1_partitions, bool)
        or not isinstance(v1_partitions, int)
        or not 1 <= v1_partitions <= MAX_PARTITION + 1
    ):
        raise ValueError(
            f"v1_partitions must be a number from 1 to {MAX_PARTITION + 1}, not {v1_partitions!r}"
        )


def negotiate(
    status: int,
    body: bytes,
    *,
    feed: str,
    v1_partitions: int | None = None,
    quote: Callable[[bytes], str] = excerpt,
) -> FeedInfo:
    """Return what the feed is, by its response to an argument-less GET.

    Redirects and what the transport deals with (401, 403, and statuses that are retried) don't come
    here.

    Arguments:
        status: of the response.
        body: of the response.
        feed: for messages.
        v1_partitions: the number of partitions, in case the feed speaks dialect v1.
        quote: makes an excerpt of the body for a message.

    Raises:
        NegotiationError: this is no feed, or a v1 feed without `v1_partitions`.
        ProtocolError: a field of the discovery has a wrong type.
        LineageError: a partition's id or lineage is impossible.
        ValueError: `v1_partitions` is no possible number.
    """
    check_v1_partitions(v1_partitions)
    if status == 400:
        return _v1(v1_partitions, body, feed, quote)
    if status != 200:
        raise NegotiationError(
            f"no feed answers here: status {status}: '{quote(body)}'. Check the URL", feed=feed
        )
    try:
        found = orjson.loads(body.removeprefix(BOM_UTF8))
    except ValueError as error:
        raise NegotiationError(
            "no feed answers here: status 200 with a body that is not JSON: "
            f"'{quote(body)}'. Check the URL",
            feed=feed,
        ) from error
    if isinstance(found, dict) and found.get("partitions", ()) is None:
        found["partitions"] = []  # as Go encodes a slice that nothing was ever added to
    if not isinstance(found, dict) or not isinstance(found.get("partitions"), list):
        raise NegotiationError(
            "no feed answers here: status 200 with JSON that lists no partitions: "
            f"'{quote(body)}'. Check the URL",
            feed=feed,
        )
    return _Discovery(found, feed).info()


def _v1(
    v1_partitions: int | None, body: bytes, feed: str, quote: Callable[[bytes], str]
) -> FeedInfo:
    if v1_partitions is None:
        raise NegotiationError(
            "the feed answers 400 to discovery, as a ZeroEventHub (v1) feed does: give "
            "v1_partitions, the number of partitions that its publisher documents "
            "(FeedConsumer(url, v1_partitions=4)), or check the URL if it is not one: "
            f"'{quote(body)}'",
            feed=feed,
        )
    return FeedInfo("v1", {id: Partition(id) for id in range(v1_partitions)})


class _Discovery:
    """Reads one discovery document. `info` raises for a field that is wrong."""

    def __init__(self, document: dict[str, Any], feed: str) -> None:
        self._document = document
        self._feed = feed

    def info(self) -> FeedInfo:
        token = self._token()
        return FeedInfo(
            dialect="v2-draft" if token is None else "v2-token",
            partitions=self._partitions(),
            token=token,
            exactly_once=self._flag("exactlyOnce"),
            stream=self._flag("stream"),
            filters=self._filters(),
        )

    def _token(self) -> str | None:
        token = self._document.get("token")
        if token is None or token == "":
            return token
        if not isinstance(token, str):
            raise self._wrong("token", token, "a string")
        self._check_cursor("token", token)
        return token

    def _flag(self, name: str) -> bool:
        value = self._document.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        if isinstance(value, dict):
            return True  # a flag with more information
        raise self._wrong(name, value, "a boolean or an object")

    def _filters(self) -> tuple[str, ...]:
        filters = self._document.get("filters")
        if filters is None:
            return ()
        if isinstance(filters, list) and all(isinstance(name, str) for name in filters):
            return tuple(filters)
        raise self._wrong("filters", filters, "a list of strings")

    def _partitions(self) -> dict[int, Partition]:
        entries = self._document["partitions"]
        ids = _ids(entries)
        if ids is None:
            ids = [self._entry_id(index, entry) for index, entry in enumerate(entries)]
        partitions = dict(zip(ids, map(_without_fields, ids), strict=True))
        if len(partitions) < len(ids):
            twice = next(id for id, times in Counter(ids).items() if times > 1)
            raise self._error(LineageError, f"the discovery lists partition {twice} twice", twice)
        for index in [index for index, fields in enumerate(map(len, entries)) if fields > 1]:
            partitions[ids[index]] = self._partition(ids[index], entries[index])
        return self._without_zero_values(partitions)

    def _entry_id(self, index: int, entry: Any) -> int:
        if not isinstance(entry, dict):
            raise self._error(
                LineageError,
                f"partitions[{index}] of the discovery is {_kind(entry)}, not an object",
            )
        id = partition_id(entry.get("id"))
        if id is None:
            problem = f"has the id {_shown(entry['id'])}" if "id" in entry else "has no id"
            raise self._error(
                LineageError,
                f"partitions[{index}] of the discovery {problem}; "
                f"an id is an integer from 0 to {MAX_PARTITION}",
            )
        return id

    def _without_zero_values(self, partitions: dict[int, Partition]) -> dict[int, Partition]:
        """Leave out the 0 that a publisher writes where there is no parent.

        An early Go version does, as a number. It shows where partition 0 starts after itself; then
        no other 0 can be trusted either.
        """
        if 0 not in partitions:
            return partitions
        zero = next(
            entry for entry in self._document["partitions"] if partition_id(entry["id"]) == 0
        )
        if type(zero.get("startsAfterPartition")) is not int or partitions[0].starts_after != 0:
            return partitions
        return {
            id: replace(partition, starts_after=partition.starts_after or None)
            for id, partition in partitions.items()
        }

    def _partition(self, id: int, entry: dict[str, Any]) -> Partition:
        closed, last_cursor = entry.get("closed"), entry.get("lastCursor")
        if closed is not None and not isinstance(closed, bool):
            raise self._wrong("closed", closed, "a boolean", id)
        if last_cursor is not None and not isinstance(last_cursor, str):
            raise self._wrong("lastCursor", last_cursor, "a string", id)
        if last_cursor:
            self._check_cursor("lastCursor", last_cursor, id)
        parent, ancestors = (self._lineage_field(id, entry, *names) for names in _SPELLINGS)
        return Partition(
            id,
            bool(closed),
            last_cursor or None,
            self._parent(id, parent),
            self._ancestors(id, ancestors),
        )

    def _lineage_field(self, id: int, entry: dict[str, Any], name: str, alias: str) -> Any:
        value, other = entry.get(name), entry.get(alias)
        if value is not None and other is not None and value != other:
            raise self._error(
                LineageError,
                f"the discovery gives both {name} and its older spelling {alias}, and they differ",
                id,
            )
        return other if value is None else value

    def _parent(self, id: int, value: Any) -> int | None:
        if value is None:
            return None
        parent = partition_id(value)
        if parent is None:
            raise self._error(
                LineageError,
                f"startsAfterPartition in the discovery is {_shown(value)}, "
                f"not a partition's id (0 to {MAX_PARTITION})",
                id,
            )
        return parent

    def _ancestors(self, id: int, value: Any) -> tuple[int, ...]:
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self._wrong(
                "cursorFromPartitions", value, "a list of partitions", id, LineageError
            )
        ancestors = []
        for item in value:
            ancestor = partition_id(item)
            if ancestor is None:
                raise self._error(
                    LineageError,
                    f"cursorFromPartitions in the discovery holds {_shown(item)}, "
                    f"not a partition's id (0 to {MAX_PARTITION})",
                    id,
                )
            ancestors.append(ancestor)
        return tuple(ancestors)

    def _check_cursor(self, name: str, value: str, partition: int | None = None) -> None:
        """Refuse what can't be stored or sent (R18)."""
        if not cursors.is_valid(value):
            raise self._error(
                ProtocolError,
                f"{name} in the discovery is {cursors.problem(value)}",
                partition,
            )

    def _wrong(
        self,
        name: str,
        value: Any,
        wanted: str,
        partition: int | None = None,
        kind: type[FeedError] = ProtocolError,
    ) -> FeedError:
        return self._error(
            kind, f"{name} in the discovery is {_kind(value)}, not {wanted}", partition
        )

    def _error(
        self, kind: type[FeedError], message: str, partition: int | None = None
    ) -> FeedError:
        return kind(message, feed=self._feed, partition=partition)


@cache
def _without_fields(id: int) -> Partition:
    """Return the partition of which a discovery says no more than its id.

    Most are listed so, and again in each discovery. To make one takes a microsecond.
    """
    return Partition(id)


def _ids(entries: list[Any]) -> list[int] | None:
    """Return the ids of all partitions, if each is sent as a string; otherwise None.

    All at once: one by one it takes twice as long, and a feed may list 32,768.
    """
    try:
        texts = [entry["id"] for entry in entries]
        digits = "".join(texts)
    except (TypeError, KeyError):
        return None
    if not texts:
        return []
    if not digits.isascii() or not digits.isdigit():
        return None
    lengths = set(map(len, texts))
    if min(lengths) == 0 or max(lengths) > 5:
        return None
    ids = list(map(int, texts))
    return ids if max(ids) <= MAX_PARTITION else None


def partition_id(value: Any) -> int | None:
    """Return a partition's id, sent as a string or an integer; None for anything else."""
    if type(value) is str and len(value) <= 5 and value.isascii() and value.isdigit():
        value = int(value)
    return value if type(value) is int and 0 <= value <= MAX_PARTITION else None


def _shown(value: Any) -> str:
    """Return a short value as it was sent, and the kind of anything else."""
    return (
        ascii(value)
        if isinstance(value, (int, float, str)) and len(repr(value)) <= 40
        else _kind(value)
    )


def _kind(value: Any) -> str:
    kinds = {
        type(None): "null",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    return kinds[type(value)]
