"""The options of ``feedapi serve``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from feedapi_client.cli.common.options import finite


class Dialect(StrEnum):
    """The dialects that a publisher can use."""

    V1 = "v1"
    V2_DRAFT = "v2-draft"
    V2_TOKEN = "v2-token"  # noqa: S105 - a dialect's name


DialectOption = Annotated[
    Dialect, typer.Option("--dialect", help="The dialect that the publisher uses.")
]
Partitions = Annotated[int, typer.Option(min=1, max=1024, help="Partitions at the start.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0 takes a free one.")]
History = Annotated[
    int, typer.Option(min=0, metavar="N", help="Events that are published before the start.")
]
Rate = Annotated[
    float, typer.Option(min=0, callback=finite, metavar="N", help="New events per second.")
]
Entities = Annotated[
    int, typer.Option(min=1, metavar="N", help="Entities that the events are about.")
]
SplitEvery = Annotated[
    float,
    typer.Option(
        min=0,
        callback=finite,
        metavar="SECONDS",
        help="Split a partition, by the two methods alternately; 0: never.",
    ),
]
RotateEvery = Annotated[
    float,
    typer.Option(min=0, callback=finite, metavar="SECONDS", help="Make the token stale; 0: never."),
]
PageSize = Annotated[int, typer.Option(min=1, metavar="N", help="Events per response.")]
CheckpointEvery = Annotated[
    int, typer.Option(min=1, metavar="N", help="Events between two cursors.")
]
Vary = Annotated[
    bool,
    typer.Option("--vary", help="Make every response different, as the specification allows."),
]
Stream = Annotated[
    bool, typer.Option("--stream", help="Offer responses that stay open (v2-draft, v2-token).")
]
BearerEnv = Annotated[
    str | None,
    typer.Option(
        "--bearer-env",
        metavar="NAME",
        help="Require the bearer token in this environment variable.",
    ),
]
MaxEvents = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Stop publishing after so many: all are kept in memory."),
]
