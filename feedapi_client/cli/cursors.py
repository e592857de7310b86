"""``feedapi cursors`` and ``feedapi leases``: stored positions, and who reads what."""

from __future__ import annotations

import datetime as dt
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import orjson

from feedapi_client import operations
from feedapi_client.cli import options, terminal
from feedapi_client.cli.command import (
    USAGE,
    CommandError,
    argument,
    command,
    command_group,
    flag,
    option,
    refused,
)
from feedapi_client.cli.options import Chosen, Connection, FeedOptions, Place, some_partitions
from feedapi_client.model import FeedKey, Position
from feedapi_client.protocol.text import counted, names

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from feedapi_client.stores.leases import Lease

cursors = command_group(
    "Show stored cursors, and repair them. Stop the consumer first: a running one ends with "
    "an error at its next commit."
)
leases = command_group("Show which instance reads which partition, where several share a feed.")
_command = partial(command, group=cursors)

_URL = "https://service/myfeed"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _OrCheckpoint(Place):
    store: str = option("STORE", options.STORE, default="")
    checkpoint: str | None = option(
        "LOCATION",
        "Positions of a Spark query, by its checkpoint, in place of a store.",
        envvar=None,
    )
    staging: str | None = option(
        "LOCATION", "With --checkpoint: the query's stagingLocation.", envvar=None
    )

    def __post_init__(self) -> None:
        if not self.store and self.checkpoint is None:
            raise ValueError("give --store, or --checkpoint of a Spark query")


async def _positions(place: Place, chosen: Chosen) -> list[operations.FeedPositions]:
    if (checkpoint := getattr(place, "checkpoint", None)) is None:
        async with place.open() as store:
            found = await operations.list_positions(store, chosen.matches)
    else:
        try:
            from feedapi_client.spark.query_offsets import read_positions
        except ImportError as missing:
            raise CommandError(str(missing)) from None
        with refused():
            read = read_positions(checkpoint, getattr(place, "staging", None))
        found = [each for each in read if chosen.matches(each.key)]
    chosen.check_found(found)
    return found


@_command(
    "cursors ls --store cursors.db",
    f"cursors ls {_URL} --lag --store env:DATABASE_URL",
    "cursors ls --store liftbridge://broker:9292/orders",
    "cursors ls --checkpoint /lake/orders/_feedapi/checkpoint",
)
async def ls(
    *,
    place: _OrCheckpoint,
    chosen: Chosen,
    partitions: list[int] | None = some_partitions(),
    json: bool = options.as_json(),
    lag: bool = flag("Ask the feed how far behind its cursors are."),
    v1_partitions: int | None = option(
        "N",
        "Number of partitions of a v1 feed, with --lag.",
        min=1,
        max=32768,
        envvar="FEEDAPI_V1_PARTITIONS",
    ),
    connection: Connection,
) -> None:
    """List positions: the cursor of each partition, for each feed and consumer.

    With --lag also whether there is more after each cursor.
    """
    exact = chosen.exact_key()
    if lag and (exact is None or exact.feed_name is not None):
        raise CommandError("--lag asks the feed: give its URL, as 'cursors ls URL --lag'", USAGE)
    async with connection.client() as http:
        feeds = await _positions(place, chosen)
        if lag and exact is not None:
            asked = operations.FeedAccess(
                url=chosen.feed or "",
                v1_partitions=v1_partitions,
                retry=options.one_shot(),
                http=http,
            )
            feeds = [
                replace(each, lag=await operations.lag(asked, each.key, each.positions))
                for each in feeds
                if each.key.url == exact.url
            ]
    _print(feeds, json=json, only=partitions)


@_command(
    "cursors show --store cursors.db",
    f"cursors show {_URL} --store liftbridge://broker:9292/orders --json",
)
async def show(*, place: Place, chosen: Chosen, json: bool = options.as_json()) -> None:
    """Show the positions of one feed and consumer: an error where the choice leaves several."""
    async with place.open() as store:
        key = await chosen.one_feed(store)
        feed = operations.FeedPositions(key, await store.load(key))
    _print([feed], json=json)


@_command("cursors export --store cursors.db > cursors.json")
async def export(*, place: Place, chosen: Chosen) -> None:
    """Print positions as JSON that 'import' reads, into this or another store."""
    _print(await _positions(place, chosen), json=True)


def _print(
    feeds: Sequence[operations.FeedPositions], *, json: bool, only: list[int] | None = None
) -> None:
    if only is not None:
        feeds = [
            replace(
                feed, positions=_some(feed.positions, only), lag=feed.lag and _some(feed.lag, only)
            )
            for feed in feeds
        ]
    if json:
        terminal.print_json(operations.export_positions(feeds))
    elif not feeds:
        print("no positions are stored")
    for feed in () if json else feeds:
        terminal.print_line(feed.key)
        rows = []
        for id in feed.partitions():
            at, behind = feed.positions.get(id), (feed.lag or {}).get(id)
            cells = ("", "", "") if at is None else (at.status, str(at.revision), at.cursor)
            rows.append([str(id), *cells, *([] if behind is None else [str(behind)])])
        columns = ("partition", "status", "revision", "cursor")
        terminal.print_table(columns if feed.lag is None else (*columns, "lag"), rows)


def _some(of: Any, chosen: Iterable[int]) -> Any:
    wanted = set(chosen)
    return {id: value for id, value in of.items() if id in wanted}


@dataclass(frozen=True, kw_only=True)
class _Changing:
    place: Place
    force: bool = flag("Do what is refused otherwise, such as beside instances that are alive.")
    dry_run: bool = flag("Only show what would change.")
    json: bool = flag("Print the positions that were changed, as 'export' does.")

    @property
    def given(self) -> dict[str, Any]:
        return {"force": self.force, "dry_run": self.dry_run}

    def tell(self, text: str, *feeds: operations.FeedPositions, counts: bool = True) -> None:
        """Print what was done with these positions, with their number in front if it `counts`."""
        if self.json:
            terminal.report(terminal.json_text(operations.export_positions(feeds)), escaped=True)
        for feed in () if self.json else feeds:
            count = f"{counted(len(feed.positions), 'position')} " if counts else ""
            done = " (dry run: nothing is changed)" if self.dry_run else ""
            terminal.report(f"{feed.key}: {count}{text}{done}")


@dataclass(frozen=True, kw_only=True)
class _Asking(_Changing):
    yes: bool = options.without_questions()

    async def done(self, change: Callable[..., Awaitable[T]], question: Callable[[T], str]) -> T:
        """Make a change after a question about what is planned; "" asks nothing."""
        if not self.yes and not self.dry_run:
            planned = await change(force=self.force, dry_run=True)
            if text := question(planned):
                options.confirm(text, yes=False, beside_json=self.json)
        return await change(**self.given)


@_command(
    "cursors set 3 CURSOR --store cursors.db",
    f"cursors set 3 _first {_URL} --store cursors.db --name app",
)
async def set_(
    *,
    partition: int = options.one_partition(),
    cursor: str = argument(
        "CURSOR",
        "Reading goes on after this place; _first for the beginning.",
        parse=options.cursor,
    ),
    chosen: Chosen,
    status: Literal["open", "drained", "superseded"] = option(
        help="drained: read to the end. superseded: its successors went on from here.",
        default="open",
    ),
    how: _Changing,
) -> None:
    """Set the cursor of a partition.

    With a complete URL as FEED also for a feed that the store does not know yet.
    """
    exact, known, position = chosen.exact_key(), False, Position(cursor, status)
    async with how.place.open(create=exact is not None and not how.dry_run) as store:
        with suppress(*(_gaps() if exact is not None else ())):
            known = any(map(chosen.matches, await store.feeds()))
        key = exact if exact is not None and not known else await chosen.one_feed(store)
        saved = await operations.set_position(store, key, partition, position, **how.given)
    text = f"partition {partition} is at '{terminal.shown(cursor)}'"
    how.tell(text, operations.FeedPositions(key, {partition: saved}), counts=False)


def _gaps() -> tuple[type[Exception], ...]:
    """The error of positions of which retention removed some. What is left is replaced."""
    try:
        from feedapi_client.liftbridge.liftbridge_errors import StreamGapError
    except ImportError:
        return ()
    return (StreamGapError,)


@_command(
    "cursors reset --store cursors.db --name app",
    "cursors reset --store cursors.db --partition 3 --yes",
)
async def reset(
    *, chosen: Chosen, partitions: list[int] | None = some_partitions(), how: _Asking
) -> None:
    """Forget positions.

    The consumer starts anew then. A single partition begins again at its first event, or where its
    lineage says.
    """
    async with how.place.open() as store:
        key = await chosen.one_feed(store)
        feed = await how.done(
            partial(operations.reset, store, key, partitions),
            lambda plan: f"{key}: forget {counted(len(plan.positions), 'position')}?",
        )
    how.tell("forgotten", feed)


@_command(
    "cursors import cursors.json --store env:DATABASE_URL",
    "cursors import cursors.json --store liftbridge://broker:9292/orders",
)
async def import_(
    *,
    source: str = argument("FILE", "What 'export' printed; - for stdin."),
    partitions: list[int] | None = some_partitions(),
    how: _Asking,
) -> None:
    """Make exported positions the current ones. Those of other partitions stay.

    A store that does not exist is created.
    """
    # The file is small: no task waits for it for long.
    text = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()  # noqa: ASYNC240
    with refused():
        feeds = operations.parse_export(text)
    if partitions is not None:
        feeds = {key: _some(positions, partitions) for key, positions in feeds.items()}
    async with how.place.open(create=not how.dry_run) as store:
        there = 0
        for key, positions in {} if source == "-" else feeds.items():
            with suppress(*_gaps()):
                there += len((await store.load(key)).keys() & positions.keys())
        replaced = f"Replace {counted(there, 'position')}, which the store has already?"
        done = await how.done(
            partial(operations.import_positions, store, feeds), lambda _: replaced if there else ""
        )
    how.tell("imported", *done)


@_command(
    "cursors rewind --to '2 hours ago' --store cursors.db --dry-run",
    "cursors rewind --to 2031-05-04T14:30 --store cursors.db --name app",
)
async def rewind(
    *,
    chosen: Chosen,
    to: dt.datetime = option(
        "TIME", "'2 hours ago', 14:30 (today), or an ISO time.", default=..., parse=options.time
    ),
    partitions: list[int] | None = some_partitions(),
    how: _Asking,
) -> None:
    """Take a consumer back to the positions of a time.

    Needs the journal of the store: 'feedapi run --journal DAYS', or a SQLite or SQL store with
    journal=Journal().
    """
    from feedapi_client.stores.base import JournalledStore

    when = to.isoformat(sep=" ", timespec="seconds")
    async with how.place.open() as store:
        if not isinstance(store, JournalledStore):
            raise CommandError("rewind: this kind of store keeps no journal", USAGE)
        key = await chosen.one_feed(store)
        change = await how.done(
            partial(operations.rewind, store, key, to, partitions),
            lambda plan: f"{key}: rewind {counted(len(plan.after), 'position')} to {when}?",
        )
    how.tell(f"rewound to {when}", operations.FeedPositions(key, change.after))


@_command(f"cursors skip {_URL} --store cursors.db --name app")
async def skip(
    *,
    feed: FeedOptions,
    partitions: list[int] | None = some_partitions(),
    how: _Changing,
    quiet: bool = options.quiet(),
) -> None:
    """Read to the end of each partition without delivering, then save the cursors there.

    For a feed that can't say where its end is (_last), and to skip what a consumer missed. Goes on
    from the stored cursors. They are saved at the end, all at once: Ctrl-C before that changes
    nothing. A store that does not exist is created.
    """
    seen = deque[Any]([(None, 0)], maxlen=1)
    async with (
        how.place.open(create=not how.dry_run) as store,
        feed.access() as access,
        terminal.progress(lambda: seen[-1], quiet=quiet),
    ):
        tell: Any = {"progress": lambda *look: seen.append(look)}
        skipped = await operations.skip(store, access, partitions or (), **how.given, **tell)
    saved = counted(len(skipped.positions), "position")
    text = f"{counted(skipped.events, 'event')} skipped, {saved} saved"
    how.tell(text, operations.FeedPositions(access.key, skipped.positions), counts=False)


@_command(f"cursors drain {_URL} 3 --store cursors.db --name app")
async def drain(
    *, feed: FeedOptions, partition: int = options.one_partition(), how: _Asking
) -> None:
    """Mark a closed partition as drained: what was not read of it is skipped, its children start.

    For a partition whose end the feed can't serve. Refused while the feed lists it as open.
    """
    what = f"mark partition {partition} as drained"
    async with how.place.open() as store, feed.access() as access:
        change = await how.done(
            partial(operations.drain, store, access, partition),
            lambda plan: f"{plan.key}: {what}, and skip what was not read?" if plan.after else "",
        )
    text = f"partition {partition} is drained{'' if change.after else ' already'}"
    how.tell(text, operations.FeedPositions(change.key, change.after), counts=False)


@_command(
    f"cursors restore {_URL} 3 --store cursors.db --name app",
    f"cursors restore {_URL} 3 --successor 10 --store cursors.db --name app",
)
async def restore(
    *,
    feed: FeedOptions,
    partitions: list[int] = options.one_partition(
        help="Listed as open again. Several that were merged are restored together."
    ),
    successors: list[int] | None = some_partitions(
        help="Holds its cursor now. Default: those with a cursor that are not listed any more. "
        "Repeatable.",
        flags="--successor",
    ),
    cursor: str | None = option(
        "CURSOR",
        "Go on after this place, where the successors stand at different cursors.",
        parse=options.cursor,
    ),
    how: _Asking,
) -> None:
    """Move cursors back to a partition, after its publisher was rolled back behind a split.

    For a partition that is listed as open again although its successors took over its cursor. They
    lose it in the same step, and take it over again when the publisher goes forward: neither way
    repeats or skips events.
    """
    chosen = frozenset(partitions)

    def told(change: operations.Change) -> str:
        given_back, at = sorted(change.after.keys() - chosen), change.after[min(chosen)].cursor
        source = f", which {names(given_back)} held" if given_back else ""
        return f"{names(partitions)} at '{terminal.shown(at)}'{source}"

    async with how.place.open() as store, feed.access() as access:
        plan = partial(operations.restore, store, access, chosen)
        change = await how.done(
            partial(plan, successors=successors, cursor=cursor),
            lambda plan: f"{plan.key}: go on with {told(plan)}?",
        )
    how.tell(told(change), operations.FeedPositions(change.key, change.after), counts=False)


def _feed(text: str) -> str:
    return FeedKey(text).url if text.startswith("feed:") else options.feed_url(text)


@_command(
    f"cursors move https://old/feed {_URL} --store cursors.db",
    f"cursors move {_URL} feed:payments --store liftbridge://broker:9292/orders",
    f"cursors move {_URL} {_URL} --selection '{{}}' '{{\"event-types\":\"a\"}}' --store c.db",
)
async def move(
    *,
    old_url: str = argument("OLD_URL", "The feed's former URL, as 'ls' shows it.", parse=_feed),
    new_url: str = argument("NEW_URL", "The URL that consumers use from now on.", parse=_feed),
    name: str | None = options.of_consumer(help="Only the cursors of this consumer."),
    partitions: list[int] | None = some_partitions(),
    selection: tuple[str, str] | None = option(
        "OLD NEW",
        "Only the cursors of the selection of events OLD, which become those of NEW: each as JSON, "
        "as 'export' prints it under filters; {} is all events.",
    ),
    overwrite: bool = flag("Delete cursors that NEW_URL has already."),
    how: _Changing,
) -> None:
    """Keep the cursors of a feed that moved: those of OLD_URL become those of NEW_URL.

    Of all its consumers, and all their filters, in one step or not at all. feed:NAME stands for
    a feed that its consumers give a feed_name. With --selection the URLs may be the same: for a
    consumer that selects other events from now on. It goes on behind the events that it had, and
    gets none of the new ones that lie before.
    """
    only: Any = {"name": name, "partitions": partitions, "overwrite": overwrite}
    only["selection"] = selection and tuple(map(_selection, selection))
    async with how.place.open() as store:
        with refused():
            moved = await operations.move(store, old_url, new_url, **only, **how.given)
    how.tell("moved here", *moved)


def _selection(text: str) -> dict[str, str]:
    with suppress(ValueError):
        pairs = orjson.loads(text)
        if isinstance(pairs, dict) and {*map(type, pairs.values())} <= {str}:
            return pairs
    example = """'{}' '{"event-types":"a;b"}'"""
    raise CommandError(f"--selection takes two JSON objects of texts, such as {example}", USAGE)


@_command("cursors rename default orders --store cursors.db")
async def rename(
    *,
    old: str = argument("OLD", "The name so far."),
    new: str = argument("NEW", "The name from now on.", parse=options.not_empty),
    feed: str | None = argument(
        "FEED", "Only of this feed: its URL or a part of it.", default=None, envvar="FEEDAPI_URL"
    ),
    partitions: list[int] | None = some_partitions(),
    how: _Changing,
) -> None:
    """Keep the cursors of a consumer that gets another name. Stop it first.

    Of all its feeds, or of one, in one step or not at all.
    """
    only: Any = {"feed": feed, "partitions": partitions}
    async with how.place.open() as store:
        with refused():
            renamed = await operations.rename(store, old, new, **only, **how.given)
    how.tell("renamed", *renamed)


@command(
    "leases ls --store cursors.db",
    "leases ls --store env:DATABASE_URL --json",
    group=leases,
    name="ls",
)
async def leases_ls(*, place: Place, chosen: Chosen, json: bool = options.as_json()) -> None:
    """List instances with their age and load, and the partitions that each one reads."""
    async with place.open() as store:
        feeds = await operations.list_leases(store, chosen.matches)
    chosen.check_found(feeds)
    shared = [feed for feed in feeds if feed.instances or feed.leases]
    if json:
        terminal.print_json({"feeds": [_as_json(feed) for feed in feeds]})
    elif not shared:
        print("no instances share a feed of this store")
    for feed in () if json else shared:
        terminal.print_line(feed.key)
        rows = []
        for one in feed.instances:
            state = "alive" if one.alive else f"dead for {terminal.age(-one.expires_in)}"
            rows.append([one.name, state, terminal.age(one.age), *_read(feed.of(one.name))])
        known = {one.name for one in feed.instances}
        if free := [lease for lease in feed.leases if lease.owner not in known]:
            rows.append(["", "nobody", "", *_read(free)])
        terminal.print_table(("instance", "state", "age", "partitions", "reads"), rows)


def _read(held: Sequence[Lease]) -> tuple[str, str]:
    texts = ", ".join(f"{lease.partition} ({terminal.age(lease.age)})" for lease in held[:12])
    return str(len(held)), texts + (" …" if len(held) > 12 else "")


def _as_json(feed: operations.FeedLeases) -> dict[str, Any]:
    instances = [
        {"instance": one.name, "alive": one.alive, "partitions": len(feed.of(one.name))}
        | {"expires_in": round(one.expires_in, 3), "age": round(one.age, 3)}
        for one in feed.instances
    ]
    held = [
        {"partition": each.partition, "instance": each.owner}
        | {"epoch": each.epoch, "age": round(each.age, 3)}
        for each in feed.leases
    ]
    key = {"url": feed.key.url, "name": feed.key.name, "filters": feed.key.filters}
    return key | {"instances": instances, "leases": held}
