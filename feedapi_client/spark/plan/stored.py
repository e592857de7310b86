"""How plans are stored. Imports no Spark.

The plan of one feed is stored as it was before a query could read several: a checkpoint of an
earlier version goes on, and that version can read what this one stores of such a query.
"""

from __future__ import annotations

import msgspec

from feedapi_client.spark.plan.epoch import PLAN_VERSION_OF_SEVERAL, EpochPlan, FeedPlan
from feedapi_client.spark.staging.errors import StagingError
from feedapi_client.spark.staging.format import compress, decompress, pack, unpack

NEWEST = PLAN_VERSION_OF_SEVERAL
"""The newest format that can be read."""


class _Versioned(msgspec.Struct):
    version: int = 0


def encode(plan: EpochPlan) -> bytes:
    """Return the object to stage."""
    stored = plan.feeds[0] if len(plan.feeds) == 1 else plan
    return pack({"kind": "plan"}, [[compress(msgspec.json.encode(stored))]])


def decode(content: bytes, key: str) -> EpochPlan:
    """Return the plan in a staged object.

    Raises:
        StagingError: the object is torn, or of a newer version of this package.
    """
    text = decompress(unpack(content, key)[1][0], key)
    version = msgspec.json.decode(text, type=_Versioned).version
    if version > NEWEST:
        raise StagingError(
            f"the plan {key} was written by a newer version of feedapi_client (format {version}, "
            f"this one reads up to {NEWEST}): run the query with that version again"
        )
    if version == PLAN_VERSION_OF_SEVERAL:
        return msgspec.json.decode(text, type=EpochPlan)
    return EpochPlan(feeds=[msgspec.json.decode(text, type=FeedPlan)])
