"""``feedapi leases ls``: show which instance reads which partition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from feedapi_client.cli.escape import print_json
from feedapi_client.cli.feed_options import Json
from feedapi_client.cli.store_options import Chosen, StorePlace, no_such_positions

if TYPE_CHECKING:
    from feedapi_client.cli.terminal import Cell
    from feedapi_client.operations import FeedLeases
    from feedapi_client.stores.leases import Lease

_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class LeasesLs:
    """Options of ``feedapi leases ls``."""

    place: StorePlace
    chosen: Chosen
    json: Json = False


async def leases_ls(options: LeasesLs) -> None:
    """List instances with their age and load, and the partitions that each one reads."""
    from feedapi_client.cli.terminal import console, plain_line, print_table
    from feedapi_client.operations import list_leases

    chosen = options.chosen
    async with options.place.open() as store:
        feeds = await list_leases(store, chosen.matches)
    if not feeds and (chosen.feed or chosen.name):
        raise no_such_positions()
    if options.json:
        print_json({"feeds": [_as_json(feed) for feed in feeds]})
        return
    shared = [feed for feed in feeds if feed.instances or feed.leases]
    if not shared:
        console().print("no instances share a feed of this store")
    for feed in shared:
        console().print(plain_line(feed.key, "bold"))
        print_table(["instance", "state", "age", "partitions", "reads"], _rows(feed))


def _rows(feed: FeedLeases) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for instance in feed.instances:
        state: Cell = ("alive", "green")
        if not instance.alive:
            state = (f"dead for {_duration(-instance.expires_in)}", "red")
        mine = feed.of(instance.name)
        age = _duration(instance.age)
        rows.append([instance.name, state, age, str(len(mine)), _partitions(mine)])
    names = {instance.name for instance in feed.instances}
    free = [lease for lease in feed.leases if lease.owner not in names]
    if free:
        rows.append(["", ("nobody", "dim"), "", str(len(free)), _partitions(free)])
    return rows


def _partitions(leases: list[Lease]) -> str:
    shown = [f"{lease.partition} ({_duration(lease.age)})" for lease in leases[:_SHOWN]]
    return ", ".join(shown) + (" …" if len(leases) > _SHOWN else "")


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _as_json(feed: FeedLeases) -> dict[str, Any]:
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
