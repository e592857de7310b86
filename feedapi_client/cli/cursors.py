"""``feedapi cursors`` and ``feedapi leases``: stored positions, and who reads what."""

from __future__ import annotations

import datetime as dt
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from feedapi_client.cli.command import (
    USAGE,
    CommandError,
    argument,
    command,
    command_group,
    confirmed,
    option,
)
from feedapi_client.cli.options import (
    ONE_SHOT,
    Chosen,
    Connection,
    FeedOptions,
    Place,
    cursor,
    feed_url,
    no_such_positions,
    not_empty,
    time,
)
from feedapi_client.cli.terminal import (
    Cell,
    print_json,
    print_line,
    print_table,
    progress,
    report,
    say,
    shown,
)
from feedapi_client.errors import FeedError
from feedapi_client.model import FeedKey, Position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from feedapi_client.consumer import FeedConsumer
    from feedapi_client.operations import Change, FeedLeases, FeedPositions
    from feedapi_client.stores.leases import Lease

cursors = command_group(
    "Show stored cursors, and repair them. Stop the consumer first: a running one ends with "
    "an error at its next commit."
)
leases = command_group("Show which instance reads which partition, where several share a feed.")

_URL = "https://service/myfeed"
_BESIDE = "Although instances that share the feed are alive."
_STATUS_STYLES = {"open": "green", "drained": "dim", "superseded": "dim"}
_LAG_STYLES = {
    "caught up": "cyan",
    "behind": "yellow",
    "not begun": "yellow",
    "no longer listed": "red",
    "unknown": "red",
}


# ---------------------------------------------------------------------- shown


@dataclass(frozen=True, kw_only=True)
class LsOptions:
    """Options of ``feedapi cursors ls``."""

    place: Place
    chosen: Chosen
    lag: bool = option(help="Ask the feed how far behind its cursors are.", default=False)
    v1_partitions: int | None = option(
        "N", "Number of partitions of a v1 feed, with --lag.", min=1, max=32768
    )
    json: bool = option(help="Print JSON.", default=False)
    connection: Connection


@command(
    "cursors ls --store cursors.db",
    f"cursors ls {_URL} --lag --store env:DATABASE_URL",
    "cursors ls --store liftbridge://broker:9292/orders",
    group=cursors,
)
async def ls(o: LsOptions) -> None:
    """List positions: the cursor of each partition, for each feed and consumer.

    With --lag also whether there is more after each cursor.
    """
    from feedapi_client.operations import FeedAccess, list_positions, with_lag
    from feedapi_client.options import RetryPolicy

    exact = o.chosen.exact_key()
    url = None if exact is None else exact.url
    if o.lag and (exact is None or exact.feed_name is not None):
        raise CommandError("--lag asks the feed: give its URL, as 'cursors ls URL --lag'", USAGE)
    async with o.connection.client() as http:
        async with o.place.open() as store:
            feeds = await list_positions(
                store, lambda key: o.chosen.matches(key) and (not o.lag or key.url == url)
            )
        if not feeds and (o.chosen.feed or o.chosen.name):
            raise no_such_positions()
        if o.lag and o.chosen.feed is not None:
            retry = RetryPolicy(give_up_after=ONE_SHOT)
            access = FeedAccess(
                url=o.chosen.feed, v1_partitions=o.v1_partitions, retry=retry, http=http
            )
            feeds = [await with_lag(access, each) for each in feeds]
    if o.json:
        _print_export(feeds)
        return
    if not feeds:
        print("no positions are stored")
    for feed in feeds:
        _print_feed(feed)


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """Options of ``feedapi cursors show``."""

    place: Place
    chosen: Chosen
    json: bool = option(help="Print JSON.", default=False)


@command(
    "cursors show --store cursors.db",
    f"cursors show {_URL} --store liftbridge://broker:9292/orders --json",
    group=cursors,
)
async def show(o: ShowOptions) -> None:
    """Show the positions of one feed and consumer: an error where the choice leaves several."""
    from feedapi_client.operations import FeedPositions

    async with o.place.open() as store:
        key = await o.chosen.one_feed(store)
        feed = FeedPositions(key, await store.load(key))
    if o.json:
        _print_export([feed])
    else:
        _print_feed(feed)


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of ``feedapi cursors export``."""

    place: Place
    chosen: Chosen


@command("cursors export --store cursors.db > cursors.json", group=cursors)
async def export(o: ExportOptions) -> None:
    """Print positions as JSON that 'import' reads, into this or another store."""
    from feedapi_client.operations import list_positions

    async with o.place.open() as store:
        feeds = await list_positions(store, o.chosen.matches)
    if not feeds and (o.chosen.feed or o.chosen.name):
        raise no_such_positions()
    _print_export(feeds)


def _print_export(feeds: Sequence[FeedPositions]) -> None:
    from feedapi_client.operations import export_positions

    print_json(export_positions(feeds))


def _print_feed(feed: FeedPositions) -> None:
    print_line(feed.key, "bold")
    columns = ["partition", "status", "revision", "cursor"]
    if feed.lag is not None:
        columns.append("lag")
    print_table(columns, [_row(feed, id) for id in feed.partitions()])


def _row(feed: FeedPositions, id: int) -> list[Cell]:
    cells: list[Cell] = [str(id), "", "", ""]
    if (position := feed.positions.get(id)) is not None:
        status = (position.status, _STATUS_STYLES[position.status])
        cells = [str(id), status, str(position.revision), position.cursor]
    if feed.lag is not None:
        cells.append((str(feed.lag[id]), _LAG_STYLES.get(feed.lag[id].state.value, "dim")))
    return cells


# ---------------------------------------------------------------------- changed in the store


class PositionStatus(StrEnum):
    """The statuses that a position can be set to."""

    OPEN = "open"
    DRAINED = "drained"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, kw_only=True)
class SetOptions:
    """Options of ``feedapi cursors set``."""

    partition: int = argument("PARTITION", min=0, max=32767)
    cursor: str = argument(
        "CURSOR", "Reading goes on after this place; _first for the beginning.", parse=cursor
    )
    place: Place
    chosen: Chosen
    status: PositionStatus = option(
        help="drained: read to the end. superseded: its successors went on from here.",
        default=PositionStatus.OPEN,
    )
    force: bool = option(help=_BESIDE, default=False)


@command(
    "cursors set 3 CURSOR --store cursors.db",
    f"cursors set 3 _first {_URL} --store cursors.db --name app",
    group=cursors,
)
async def set_(o: SetOptions) -> None:
    """Set the cursor of a partition.

    With a complete URL as FEED also for a feed that the store does not know yet.
    """
    from feedapi_client.operations import set_position

    exact = o.chosen.exact_key()
    async with o.place.open(create=exact is not None) as store:
        try:
            known = any(map(o.chosen.matches, await store.feeds()))
        except FeedError as error:
            if exact is None or not _is_gap(error):
                raise
            known = False  # what is left can't be read, and is replaced
        key = exact if exact is not None and not known else await o.chosen.one_feed(store)
        position = Position(o.cursor, o.status.value)
        await set_position(store, key, o.partition, position, force=o.force)
    report(f"{key}: partition {o.partition} is at '{shown(o.cursor)}'")


def _is_gap(error: Exception) -> bool:
    """Whether positions can't be read because the retention of their stream removed some."""
    try:
        from feedapi_client.liftbridge.liftbridge_errors import StreamGapError
    except ImportError:
        return False
    return isinstance(error, StreamGapError)


@dataclass(frozen=True, kw_only=True)
class ResetOptions:
    """Options of ``feedapi cursors reset``."""

    place: Place
    chosen: Chosen
    partitions: list[int] | None = option(
        "ID", "Only this partition. Repeatable.", flags="--partition -p", min=0, max=32767
    )
    force: bool = option(help=_BESIDE, default=False)
    yes: bool = option(help="Don't ask for confirmation.", default=False, flags="--yes -y")


@command(
    "cursors reset --store cursors.db --name app",
    "cursors reset --store cursors.db --partition 3 --yes",
    group=cursors,
)
async def reset(o: ResetOptions) -> None:
    """Forget positions.

    Without any, the consumer starts anew. A single partition begins again at its first event, or
    where its lineage says.
    """
    from feedapi_client import operations

    async with o.place.open() as store:
        key, chosen = await o.chosen.one_feed(store), o.partitions or None
        stored = len(await store.load(key))
        plan = await operations.reset(store, key, chosen, force=o.force, dry_run=True)
        confirmed(f"{key}: forget {len(plan.positions)} of {stored} positions?", yes=o.yes)
        done = await operations.reset(store, key, chosen, force=o.force)
    report(f"{key}: {len(done.positions)} positions forgotten")


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of ``feedapi cursors import``."""

    source: str = argument("FILE", "What 'export' printed; - for stdin.")
    place: Place
    force: bool = option(help=_BESIDE, default=False)
    yes: bool = option(help="Don't ask for confirmation.", default=False, flags="--yes -y")


@command(
    "cursors import cursors.json --store env:DATABASE_URL",
    "cursors import cursors.json --store liftbridge://broker:9292/orders",
    group=cursors,
)
async def import_(o: ImportOptions) -> None:
    """Make exported positions the current ones. Those of other partitions stay.

    A store that does not exist is created.
    """
    from feedapi_client.operations import count_replaced, import_positions, parse_export

    stdin = o.source == "-"
    text = sys.stdin.buffer.read() if stdin else Path(o.source).read_bytes()  # noqa: ASYNC240 - a small file
    try:
        feeds = parse_export(text)
    except ValueError as error:
        raise CommandError(str(error), USAGE) from None
    async with o.place.open(create=True) as store:
        count = 0
        for key, positions in {} if o.yes or stdin else feeds.items():
            try:
                count += await count_replaced(store, {key: positions})
            except FeedError as error:
                if not _is_gap(error):  # what is left can't be read, and is replaced
                    raise
        if count:
            confirmed(
                f"{count} positions are there already and will be replaced. Go on?", yes=o.yes
            )
        for feed in await import_positions(store, feeds, force=o.force):
            report(f"{feed.key}: {len(feed.positions)} positions imported")


@dataclass(frozen=True, kw_only=True)
class RewindOptions:
    """Options of ``feedapi cursors rewind``."""

    place: Place
    chosen: Chosen
    to: dt.datetime = option(
        "TIME", "'2 hours ago', 14:30 (today), or an ISO time.", default=..., parse=time
    )
    dry_run: bool = option(help="Only show what would change.", default=False)
    force: bool = option(help=_BESIDE, default=False)
    yes: bool = option(help="Don't ask for confirmation.", default=False, flags="--yes -y")


@command(
    "cursors rewind --to '2 hours ago' --store cursors.db --dry-run",
    "cursors rewind --to 2031-05-04T14:30 --store cursors.db --name app",
    group=cursors,
)
async def rewind(o: RewindOptions) -> None:
    """Take a consumer back to the positions of a time.

    Needs the journal of the store: 'feedapi run --journal DAYS', or a SQLite or SQL store with
    journal=Journal().
    """
    from feedapi_client import operations
    from feedapi_client.stores.base import JournalledStore

    when = o.to.isoformat(sep=" ", timespec="seconds")
    async with o.place.open() as store:
        if not isinstance(store, JournalledStore):
            raise CommandError("rewind: this kind of store keeps no journal", USAGE)
        key = await o.chosen.one_feed(store)
        if o.dry_run or not o.yes:
            plan = await operations.rewind(store, key, o.to, force=o.force, dry_run=True)
            _print_change(plan, when)
        if o.dry_run:
            # A time such as "2 hours ago" is another one in the next command.
            print(f"To do this: --to {o.to.isoformat()}")
            return
        confirmed("Stop the consumer first. Rewind?", yes=o.yes)
        done = await operations.rewind(store, key, o.to, force=o.force)
    report(f"{key}: {len(done.after)} positions are those of {when}")


def _print_change(change: Change, when: str) -> None:
    def row(id: int) -> list[Cell]:
        now, then = change.before.get(id), change.after.get(id)
        before = (now.status, now.cursor) if now else ("", "")
        after = (then.status, then.cursor) if then else ("forgotten", "")
        style = "" if before == after else "yellow"
        return [str(id), *before, *((text, style) for text in after)]

    print_line(f"{change.key}, at {when}", "bold")
    print_table(
        ("partition", "status now", "cursor now", "status then", "cursor then"),
        [row(id) for id in sorted(change.before.keys() | change.after.keys())],
    )


# ---------------------------------------------------------------------- changed by the feed


@dataclass(frozen=True, kw_only=True)
class SkipOptions:
    """Options of ``feedapi cursors skip``."""

    feed: FeedOptions
    place: Place
    partitions: list[int] | None = option(
        "ID", "Only this partition. Repeatable.", flags="--partition -p", min=0, max=32767
    )
    force: bool = option(help=_BESIDE, default=False)
    quiet: bool = option(
        help="No progress on stderr (shown only where stderr is a terminal).",
        default=False,
        flags="--quiet -q",
    )


@command(f"cursors skip {_URL} --store cursors.db --name app", group=cursors)
async def skip(o: SkipOptions) -> None:
    """Read to the end of each partition without delivering, then save the cursors there.

    For a feed that can't say where its end is (_last), and to skip what a consumer missed. Goes on
    from the stored cursors. They are saved at the end, all at once: Ctrl-C before that changes
    nothing. A store that does not exist is created.
    """
    from feedapi_client import operations

    seen: list[tuple[FeedConsumer | None, int]] = [(None, 0)]

    def look(consumer: FeedConsumer, events: int) -> None:
        seen[0] = consumer, events

    async with o.place.open(create=True) as store, o.feed.access() as feed:
        async with progress(lambda: seen[0], quiet=o.quiet):
            skipped = await operations.skip(
                store, feed, o.partitions or (), force=o.force, progress=look, report=say
            )
        report(
            f"{feed.key}: {skipped.events} events skipped, {len(skipped.positions)} positions saved"
        )


@dataclass(frozen=True, kw_only=True)
class DrainOptions:
    """Options of ``feedapi cursors drain``."""

    feed: FeedOptions
    partition: int = argument("PARTITION", min=0, max=32767)
    place: Place
    force: bool = option(
        help="Although the feed lists the partition as open, neither it nor a cursor is known, or "
        "instances that share the feed are alive.",
        default=False,
    )
    yes: bool = option(help="Don't ask for confirmation.", default=False, flags="--yes -y")


@command(f"cursors drain {_URL} 3 --store cursors.db --name app", group=cursors)
async def drain(o: DrainOptions) -> None:
    """Mark a closed partition as drained: what was not read of it is skipped, its children start.

    For a partition whose end the feed can't serve. Refused while the feed lists it as open.
    """
    from feedapi_client import operations

    async with o.place.open() as store, o.feed.access() as feed:
        change = await operations.drain(store, feed, o.partition, force=o.force, dry_run=True)
        where = f"{change.key}: partition {o.partition}"
        if not change.after:
            report(f"{where} is drained already")
            return
        confirmed(
            f"{where} {change.reason}. Events that were not read will be skipped. Mark it as "
            "drained?",
            yes=o.yes,
        )
        await operations.apply_change(store, change, force=o.force)
    report(f"{where} is drained")


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """Options of ``feedapi cursors restore``."""

    feed: FeedOptions
    partitions: list[int] = argument(
        "PARTITION",
        "Listed as open again. Several that were merged are restored together.",
        min=0,
        max=32767,
    )
    place: Place
    successors: list[int] | None = option(
        "ID",
        "Holds its cursor now. Default: those with a cursor that are not listed any more. "
        "Repeatable.",
        flags="--successor",
        min=0,
        max=32767,
    )
    cursor: str | None = option(
        "CURSOR",
        "Go on after this place, where the successors stand at different cursors.",
        parse=cursor,
    )
    force: bool = option(
        help="Although the feed does not list the partition as open, or instances that share the "
        "feed "
        "are alive.",
        default=False,
    )
    yes: bool = option(help="Don't ask for confirmation.", default=False, flags="--yes -y")


@command(
    f"cursors restore {_URL} 3 --store cursors.db --name app",
    f"cursors restore {_URL} 3 --successor 10 --store cursors.db --name app",
    group=cursors,
)
async def restore(o: RestoreOptions) -> None:
    """Move cursors back to a partition, after its publisher was rolled back behind a split.

    For a partition that is listed as open again although its successors took over its cursor. They
    lose it in the same step, and take it over again when the publisher goes forward: neither way
    repeats or skips events.
    """
    from feedapi_client import operations
    from feedapi_client.protocol.text import names

    async with o.place.open() as store, o.feed.access() as feed:
        change = await operations.restore(
            store,
            feed,
            frozenset(o.partitions),
            successors=o.successors,
            cursor=o.cursor,
            force=o.force,
            dry_run=True,
        )
        where = f"{change.key}: {names(o.partitions)}"
        given_back = sorted(change.after.keys() - set(o.partitions))
        at = shown(change.after[min(o.partitions)].cursor)
        source = f", which {names(given_back)} held" if given_back else ""
        confirmed(f"{where}: go on from the cursor '{at}'{source}?", yes=o.yes)
        await operations.apply_change(store, change, force=o.force)
    report(f"{where} at '{at}'{source}")


# ---------------------------------------------------------------------- under another key


def _feed(text: str) -> str:
    """Return the URL of a feed, or ``feed:NAME``."""
    return FeedKey(text).url if text.startswith("feed:") else feed_url(text)


@dataclass(frozen=True, kw_only=True)
class MoveOptions:
    """Options of ``feedapi cursors move``."""

    old_url: str = argument("OLD_URL", "The feed's former URL, as 'ls' shows it.", parse=_feed)
    new_url: str = argument("NEW_URL", "The URL that consumers use from now on.", parse=_feed)
    place: Place
    name: str | None = option("NAME", "Only the cursors of this consumer.", envvar="FEEDAPI_NAME")
    selection: tuple[str, str] | None = option(
        "OLD NEW",
        "Only the cursors of the selection of events OLD, which become those of NEW: each as JSON, "
        "as 'export' prints it under filters; {} is all events.",
    )
    overwrite: bool = option(help="Delete cursors that NEW_URL has already.", default=False)
    force: bool = option(help=_BESIDE, default=False)


@command(
    f"cursors move https://old/feed {_URL} --store cursors.db",
    f"cursors move {_URL} feed:payments --store liftbridge://broker:9292/orders",
    f"cursors move {_URL} {_URL} --selection '{{}}' '{{\"event-types\":\"a\"}}' --store c.db",
    group=cursors,
)
async def move(o: MoveOptions) -> None:
    """Keep the cursors of a feed that moved: those of OLD_URL become those of NEW_URL.

    Of all its consumers, and all their filters, in one step or not at all. feed:NAME stands for
    a feed that its consumers give a feed_name. With --selection the URLs may be the same: for a
    consumer that selects other events from now on. It goes on behind the events that it had, and
    gets none of the new ones that lie before.
    """
    from feedapi_client import operations

    before, after = map(_selection, o.selection) if o.selection is not None else (None, None)
    if FeedKey(o.old_url).url == FeedKey(o.new_url).url and before == after:
        raise CommandError("OLD_URL and NEW_URL have the same cursors", USAGE)
    async with o.place.open() as store:
        moved = await operations.move(
            store,
            o.old_url,
            o.new_url,
            name=o.name,
            selection=None if before is None or after is None else (before, after),
            overwrite=o.overwrite,
            force=o.force,
        )
    for feed in moved:
        report(f"{feed.key}: {len(feed.positions)} positions moved here")


def _selection(text: str) -> dict[str, str]:
    try:
        pairs = orjson.loads(text)
    except ValueError:
        pairs = None
    if not isinstance(pairs, dict) or not all(isinstance(each, str) for each in pairs.values()):
        raise CommandError(
            "--selection takes two JSON objects of texts, such as '{}' "
            '\'{"event-types":"created;paid"}\'',
            USAGE,
        )
    return pairs


@dataclass(frozen=True, kw_only=True)
class RenameOptions:
    """Options of ``feedapi cursors rename``."""

    old_name: str = argument("OLD", "The name so far.")
    new_name: str = argument("NEW", "The name from now on.", parse=not_empty)
    feed: str | None = argument(
        "FEED", "Only of this feed: its URL or a part of it.", default=None, envvar="FEEDAPI_URL"
    )
    place: Place
    force: bool = option(help=_BESIDE, default=False)

    def __post_init__(self) -> None:
        if self.old_name == self.new_name:
            raise ValueError("NEW must be another name")


@command("cursors rename default orders --store cursors.db", group=cursors)
async def rename(o: RenameOptions) -> None:
    """Keep the cursors of a consumer that gets another name. Stop it first.

    Of all its feeds, or of one, in one step or not at all.
    """
    from feedapi_client import operations

    async with o.place.open() as store:
        renamed = await operations.rename(store, o.old_name, o.new_name, feed=o.feed, force=o.force)
    for feed in renamed:
        report(f"{feed.key}: {len(feed.positions)} positions have this name now")


# ---------------------------------------------------------------------- leases


@dataclass(frozen=True, kw_only=True)
class LeasesLsOptions:
    """Options of ``feedapi leases ls``."""

    place: Place
    chosen: Chosen
    json: bool = option(help="Print JSON.", default=False)


@command(
    "leases ls --store cursors.db",
    "leases ls --store env:DATABASE_URL --json",
    group=leases,
    name="ls",
)
async def leases_ls(o: LeasesLsOptions) -> None:
    """List instances with their age and load, and the partitions that each one reads."""
    from feedapi_client.operations import list_leases

    async with o.place.open() as store:
        feeds = await list_leases(store, o.chosen.matches)
    if not feeds and (o.chosen.feed or o.chosen.name):
        raise no_such_positions()
    if o.json:
        print_json({"feeds": [_leases_as_json(feed) for feed in feeds]})
        return
    shared = [feed for feed in feeds if feed.instances or feed.leases]
    if not shared:
        print("no instances share a feed of this store")
    for feed in shared:
        print_line(feed.key, "bold")
        print_table(("instance", "state", "age", "partitions", "reads"), _lease_rows(feed))


def _lease_rows(feed: FeedLeases) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for instance in feed.instances:
        state: Cell = ("alive", "green")
        if not instance.alive:
            state = (f"dead for {_duration(-instance.expires_in)}", "red")
        mine = feed.of(instance.name)
        age = _duration(instance.age)
        rows.append([instance.name, state, age, str(len(mine)), _read(mine)])
    names = {instance.name for instance in feed.instances}
    free = [lease for lease in feed.leases if lease.owner not in names]
    if free:
        rows.append(["", ("nobody", "dim"), "", str(len(free)), _read(free)])
    return rows


def _read(leases: list[Lease]) -> str:
    texts = [f"{lease.partition} ({_duration(lease.age)})" for lease in leases[:12]]
    return ", ".join(texts) + (" …" if len(leases) > len(texts) else "")


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _leases_as_json(feed: FeedLeases) -> dict[str, Any]:
    return {
        "url": feed.key.url,
        "name": feed.key.name,
        "filters": feed.key.filters,
        "instances": [
            {
                "instance": one.name,
                "alive": one.alive,
                "expires_in": round(one.expires_in, 3),
                "age": round(one.age, 3),
                "partitions": len(feed.of(one.name)),
            }
            for one in feed.instances
        ],
        "leases": [
            {
                "partition": lease.partition,
                "instance": lease.owner,
                "epoch": lease.epoch,
                "age": round(lease.age, 3),
            }
            for lease in feed.leases
        ],
    }
