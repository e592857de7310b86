"""``feedapi run``: consume a feed with the application's handler."""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from feedapi_client.arguments import check_async_function, import_function, place_of
from feedapi_client.cli import options
from feedapi_client.cli.command import (
    FENCED,
    HANDLER_FAILED,
    USAGE,
    CommandError,
    Stopping,
    command,
    flag,
    option,
    refused,
    stopping,
)
from feedapi_client.cli.terminal import write_records
from feedapi_client.errors import FeedError, FencedError

if TYPE_CHECKING:
    from feedapi_client.model import Event
    from feedapi_client.quarantine import Retry

Handler = Callable[[Any], Awaitable[object]]
_handler = partial(option, rich_help_panel="Handler")


@dataclass(frozen=True, kw_only=True)
class Application:
    handler: str = _handler(
        "MODULE:FUNCTION",
        "The application's 'async def handle(batch)', or with --key 'async def handle(event)', "
        "searched in this directory too; or a function without parameters that returns an "
        "asynchronous context manager which gives the handler.",
        default=...,
    )
    key: str | None = _handler(
        "JSON_POINTER",
        "Handle event by event: those of one key in order, different keys at once. Where in the "
        "payload the key is, such as /order/id.",
    )

    def __post_init__(self) -> None:
        self.key_path()

    def key_path(self) -> list[str]:
        head, *parts = (self.key or "").split("/")
        if self.key is not None and (head or not parts or re.search(r"~(?![01])", self.key)):
            raise ValueError(
                "--key takes a JSON pointer, which begins with a slash: /order/id. A slash in a "
                "name is ~1, and a tilde ~0. (The key of --cert is --cert-key.)"
            )
        return [part.replace("~1", "/").replace("~0", "~") for part in parts]

    def load(self) -> Callable[..., Any]:
        with refused():
            function = import_function(self.handler, "--handler")
        if _takes_a_batch(function):
            self._check(function)
        return function

    @asynccontextmanager
    async def opened(self, function: Callable[..., Any]) -> AsyncIterator[Handler]:
        handler, option = function, f"--handler {self.handler}"
        async with AsyncExitStack() as stack:
            if not _takes_a_batch(function):
                try:
                    handler = await stack.enter_async_context(function())
                except TypeError as error:
                    text = f"{option} takes no batch and no event, so {error}"
                    raise CommandError(text, USAGE) from None
                except Exception as error:
                    # Not its text, which may quote a password, but what is known of its kind.
                    from feedapi_client.causes import store_problem

                    reason, name = store_problem(error), type(error).__qualname__
                    where = place_of(error, self.handler.partition(":")[0])
                    text = f"{name}: {reason}" if reason else name
                    raise CommandError(f"{option} can't be opened: {text}{where}") from error
                self._check(handler)
            yield handler

    def _check(self, handler: object) -> None:
        form = f"async def handle({'batch' if self.key is None else 'event'}): ..."
        try:
            check_async_function(f"--handler {self.handler}", handler, form)
        except TypeError as error:
            raise CommandError(str(error), USAGE) from None


def _journal(days: str) -> Any:
    from feedapi_client.stores.journal import Journal

    try:
        return Journal(keep=timedelta(days=float(days)))
    except (ValueError, OverflowError):
        raise ValueError("give a number of days") from None


@dataclass(frozen=True, kw_only=True)
class _Run(Application):
    environment: ClassVar[bool] = True

    feed: options.Consumed
    place: options.Store
    on_failure: Literal["raise", "retry", "quarantine"] = _handler(
        help="When the handler raises: end with exit code 3; or call it again, --attempts times; "
        "or then put the failing event into quarantine.",
        default="raise",
    )
    attempts: int = _handler(
        "N",
        "Calls of a handler that fails, with --on-failure retry or quarantine; 0: no limit.",
        default=5,
        min=0,
    )
    quarantine_limit: int = _handler(
        "N",
        "Events of a partition in a row that go into quarantine; the next one ends it.",
        default=100,
        min=1,
    )
    share: bool = flag(
        "Divide the partitions with other processes of this store and name, on any machine."
    )
    grace: float = option(
        "SECONDS",
        "Time to finish and commit what is in flight after SIGTERM and SIGINT.",
        default=25.0,
        min=0,
    )
    max_concurrency: int = _handler(
        "N", "Partitions, or with --key events, that are handled at once.", default=32, min=1
    )
    start: Literal["first", "last"] | None = options.where_to_begin(rich_help_panel="Feed")
    follow: bool = option(
        help="Go on at the end of the feed, or end there with exit code 0.",
        default=True,
        flags="--follow/--no-follow",
    )
    park: bool = flag("Go on with the others when the feed can't continue one partition.")
    journal: Any = option(
        "DAYS",
        "Keep a history of the cursors for 'feedapi cursors rewind', for so many days.",
        parse=_journal,
        rich_help_panel="Store",
    )
    log_format: Literal["text", "json"] = option(
        help="Log records on stderr: text, or JSON, one a line.", default="text"
    )

    def __post_init__(self) -> None:
        connection = self.feed.connection
        certified = connection.cert is not None and connection.cert_key is None
        if certified and self.key is not None and Path(self.key).is_file():
            # --cert and --key, as curl and other commands have them: no member of a payload.
            connection = replace(connection, cert_key=self.key)
            object.__setattr__(self, "feed", replace(self.feed, connection=connection))
            object.__setattr__(self, "key", None)
        super().__post_init__()

    def policy(self) -> Literal["raise"] | Retry:
        from feedapi_client.quarantine import Quarantine, Retry

        if self.on_failure == "raise":
            return "raise"
        aside = Quarantine(limit=self.quarantine_limit)
        then: Literal["raise"] | Quarantine = aside if self.on_failure == "quarantine" else "raise"
        return Retry(attempts=self.attempts or None, then=then)


@command(
    "run https://service/myfeed --handler shop.orders:handle --store cursors.db",
    "run https://service/myfeed --handler shop.orders:handle --store env:DATABASE_URL --share",
    "run https://service/myfeed --handler shop.orders:handle --store c.db --monitor 0.0.0.0:9464",
    "run https://service/myfeed --handler shop.orders:each --store c.db --key /order/id",
    "run https://service/myfeed --handler shop.orders:handle --store cursors.db --journal 7",
)
async def run(o: _Run) -> int:
    """Consume a feed with the application's handler: the library without a main program.

    SIGTERM and Ctrl-C end it after what is in flight, a second signal cancels that, a third ends
    at once. Exit codes: 3 when the handler failed, 4 when another consumer of this name has taken
    over, 130 and 143 when what was in flight was cancelled after --grace; see feedapi --help.
    """
    write_records(json=o.log_format == "json")
    # Before signals are caught: until then they end the process at once.
    function = o.load()
    try:
        async with stopping(o.grace) as stop:
            await _consume(o, function, stop)
    except FencedError as error:
        raise CommandError(str(error), FENCED) from None
    cut_short = stop.consumer is not None and stop.consumer.cut_short
    return stop.exit_code if cut_short else 0


async def _consume(o: _Run, function: Callable[..., Any], stop: Stopping) -> None:
    from feedapi_client.options import Share
    from feedapi_client.quarantine.failure_text import failure_line

    settings: dict[str, Any] = {"share": Share() if o.share else None, "start": o.start}
    settings |= {"follow": o.follow, "on_error": "park" if o.park else "raise"}
    async with (
        o.place.open(create=True, journal=o.journal) as store,
        o.feed.consumer(store, **settings) as consumer,
        consumer,
    ):
        stop.consumer = consumer
        consume: Callable[..., Any] = consumer.run
        if path := o.key_path():
            consume = partial(consumer.run_by_key, key=partial(_key_at, path))
        async with o.opened(function) as handle:
            try:
                await consume(handle, on_failure=o.policy(), max_concurrency=o.max_concurrency)
            except FeedError:  # of the feed or the store
                raise
            except Exception as error:  # noqa: BLE001 - the handler may raise anything
                where = place_of(error, o.handler.partition(":")[0])
                text = f"the handler failed with {failure_line(error)}{where}"
                raise CommandError(text, HANDLER_FAILED) from None


def _key_at(path: list[str], event: Event) -> Hashable:
    """Return what is at one place of a payload. No error says a word of it."""
    found: Any = event.json()
    for part in path:
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            found = found.get(part) if isinstance(found, dict) else None
    if found is None or isinstance(found, dict | list):
        raise LookupError("the payload has no text, number or boolean at --key")
    key: Hashable = found
    return key


def _takes_a_batch(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True  # written in C: its signature can't be known
    kinds = inspect.Parameter
    takes = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.VAR_POSITIONAL)
    return any(each.kind in takes for each in parameters)
