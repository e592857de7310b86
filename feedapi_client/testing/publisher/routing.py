"""Which entity an event belongs to, and to which partition of a split an entity goes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import orjson

Payload = Mapping[str, Any] | str | bytes
"""The data of an event: a JSON value, or bytes of JSON that are sent verbatim."""

EntityKey = Callable[[Any], object]
"""A function from a decoded payload to the entity that the event belongs to."""


def default_key(payload: Any) -> object:
    """Return the entity of a payload: its field ``entity``, else ``id``, else None."""
    if isinstance(payload, Mapping):
        entity = payload.get("entity")
        return payload.get("id") if entity is None else entity
    return None


def decoded(payload: Payload) -> Any:
    """Return the JSON value of a payload."""
    return orjson.loads(payload) if isinstance(payload, bytes) else payload


def hash_of(entity: object) -> int:
    """Return the hash of an entity. It is the same in every process."""
    # crc32 is stable over processes, unlike hash(), and cheap.
    return zlib.crc32(str(entity).encode())


def choose(hash: int, count: int, *, salt: int) -> int:
    """Return which of `count` partitions an entity goes to, by its hash.

    A different `salt` spreads the same hashes differently, so that nested splits of one partition
    are independent. The mixing is the finaliser of murmur3.
    """
    mixed = (hash ^ (salt * 0x9E3779B1)) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)) % count
