"""Which entity an event belongs to, and to which partition of a split an entity goes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import orjson

Payload = Mapping[str, Any] | str | bytes


def default_key(payload: Any) -> object:
    """The entity of a payload: its field ``entity``, else ``id``, else None."""
    if isinstance(payload, Mapping):
        entity = payload.get("entity")
        return payload.get("id") if entity is None else entity
    return None


def decoded(payload: Payload) -> Any:
    """The JSON value of a payload."""
    return orjson.loads(payload) if isinstance(payload, bytes) else payload


def hash_of(entity: object) -> int:
    """The entity's hash, the same in every process."""
    # crc32 is stable over processes, unlike hash(), and cheap.
    return zlib.crc32(str(entity).encode())


def mix(hash: int, salt: int) -> int:
    """Spreads a hash differently for each salt, so that nested splits of one partition are independent (murmur3's finaliser)."""
    mixed = (hash ^ (salt * 0x9E3779B1)) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)
