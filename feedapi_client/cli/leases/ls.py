"""``feedapi leases ls``: print instances and leases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from feedapi_client.cli.common.console import console, plain_line
from feedapi_client.cli.common.errors import CommandError
from feedapi_client.cli.common.json_output import print_json
from feedapi_client.cli.common.run_async import run_async
from feedapi_client.cli.common.tables import Cell, print_table
from feedapi_client.cli.cursors.selection import Selection, no_such_positions
from feedapi_client.model import FeedKey
from feedapi_client.stores.leases import Instance, Lease, LeaseStore

_SHOWN = 12


@dataclass(frozen=True, slots=True)
class FeedLeases:
    """The instances and leases of one feed and consumer."""

    key: FeedKey
    instances: list[Instance]
    leases: list[Lease]

    def of(self, instance: str) -> list[Lease]:
        """Return the leases of an instance."""
        return [lease for lease in self.leases if lease.owner == instance]


def print_leases(selection: Selection, *, json: bool) -> None:
    """Print the instances of the chosen feeds, or JSON. Raises `CommandError`."""
    feeds = run_async(_load, selection)
    if json:
        print_json({"feeds": [_as_json(feed) for feed in feeds]})
        return
    shared = [feed for feed in feeds if feed.instances or feed.leases]
    if not shared:
        console().print("no instances share a feed of this store")
    for feed in shared:
        console().print(plain_line(feed.key, "bold"))
        columns = ["instance", "state", "age", "partitions", "reads"]
        print_table(columns, _rows(feed))


async def _load(selection: Selection) -> list[FeedLeases]:
    async with selection.open() as store:
        if not isinstance(store, LeaseStore):
            raise CommandError("the store keeps no leases")
        keys = await selection.feeds(store)
        if not keys and selection.choice:
            raise no_such_positions()
        return [
            FeedLeases(
                key,
                await store.instances(key),
                [lease for p, lease in (await store.leases(key)).items() if p >= 0],
            )
            for key in keys
        ]


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
