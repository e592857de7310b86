"""``feedapi serve``: an example feed, to try consumers with."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from feedapi_client.arguments import environment_value
from feedapi_client.cli.command import command, option, run_async


class ServedDialect(StrEnum):
    """The dialects that a publisher can use."""

    V1 = "v1"
    V2_DRAFT = "v2-draft"
    V2_TOKEN = "v2-token"  # noqa: S105 - a dialect's name


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Options of ``feedapi serve``."""

    dialect: ServedDialect = option(
        help="The dialect that the publisher uses.", default=ServedDialect.V2_TOKEN
    )
    partitions: int = option(help="Partitions at the start.", default=2, min=1, max=1024)
    port: int = option(help="On 127.0.0.1; 0 takes a free one.", default=0, min=0, max=65535)
    history: int = option("N", "Events that are published before the start.", default=1000, min=0)
    rate: float = option("N", "New events per second.", default=10.0, min=0)
    split_every: float = option(
        "SECONDS",
        "Split a partition, by the two methods alternately; 0: never.",
        default=0.0,
        min=0,
    )
    rotate_every: float = option("SECONDS", "Make the token stale; 0: never.", default=0.0, min=0)
    page_size: int = option("N", "Events per response.", default=1000, min=1)
    checkpoint_every: int = option("N", "Events between two cursors.", default=100, min=1)
    vary: bool = option(
        help="Make every response different, as the specification allows.", default=False
    )
    stream: bool = option(
        help="Offer responses that stay open (v2-draft, v2-token).", default=False
    )
    bearer_env: str | None = option(
        "NAME",
        "Require the bearer token in this environment variable.",
        parse=lambda name: environment_value(name, "").removeprefix("Bearer ").strip(),
    )

    def __post_init__(self) -> None:
        if self.dialect is ServedDialect.V1 and self.split_every:
            raise ValueError("--split-every: a v1 feed has no splits")


@command("serve --rate 20 --split-every 20", "serve --dialect v2-draft --port 8080")
def serve(o: Serve) -> None:
    """Serve an example feed on the loopback interface, to try consumers with, until Ctrl-C.

    The first line on stdout is its URL.
    """
    from feedapi_client.cli.example_feed import ExampleFeed, serve_feed
    from feedapi_client.testing import Publisher

    publisher = Publisher(
        o.partitions,
        dialect=o.dialect.value,
        page_size=o.page_size,
        checkpoint_every=o.checkpoint_every,
        vary=o.vary,
        stream=o.stream,
        bearer=o.bearer_env,
        filters=("entity", "type") if o.dialect is ServedDialect.V2_DRAFT else (),
    )
    feed = ExampleFeed(publisher)
    feed.publish(o.history)
    with suppress(KeyboardInterrupt):
        run_async(serve_feed, feed, o.port, o.rate, o.split_every, o.rotate_every)
