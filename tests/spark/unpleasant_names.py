"""Names of columns that SQL, Spark and table formats all have something against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNPLEASANT = ("my-field", "Ärger", "order.id", "a b", "x`y", "n(1)", "select", "名前", "a=b;c,{d}")


def unpleasant_schema(names: Sequence[str] = UNPLEASANT) -> str:
    """A column of text for each of them, as DDL, a number, and one with such names inside."""
    columns = ["`{}` STRING".format(name.replace("`", "``")) for name in names]
    return ", ".join(
        [*columns, "`geo.lat` DOUBLE", "nested ARRAY<STRUCT<`a.b c`: MAP<STRING, INT>>>"]
    )


def unpleasant_event(number: int, value: str) -> dict[str, Any]:
    """An event with a value of each; `value` is that of ``Ärger``."""
    texts = {name: f"{name} {number}" for name in UNPLEASANT} | {"Ärger": value}
    return {**texts, "geo.lat": number + 0.5, "nested": [{"a.b c": {"x y": number}}]}
