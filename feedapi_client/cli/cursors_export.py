"""``feedapi cursors export``: write positions as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from feedapi_client.cli.reporting import run_async
from feedapi_client.cli.store_options import Chosen, StorePlace


@dataclass(frozen=True, kw_only=True)
class CursorsExport:
    """Options of ``feedapi cursors export``."""

    place: StorePlace
    chosen: Chosen


def cursors_export(options: CursorsExport) -> None:
    """Print positions as JSON that 'import' reads, into this or another store."""
    from feedapi_client.cli.cursors_ls import CursorsLs, positions_and_lags, print_export
    from feedapi_client.cli.feed_options import Connection

    chosen = CursorsLs(place=options.place, chosen=options.chosen, connection=Connection())
    print_export(run_async(positions_and_lags, chosen))
