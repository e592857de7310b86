"""``feedapi cat --from TIME``: the positions that a consumer had at a time, by its journal."""

from __future__ import annotations

from datetime import datetime

import typer

from feedapi_client.cli.common.stores import open_store
from feedapi_client.model import FeedKey
from feedapi_client.stores.base import JournalledStore
from feedapi_client.stores.journal import check_rewind
from feedapi_client.stores.memory import MemoryCursorStore


async def positions_of(spec: str, key: FeedKey, when: datetime) -> MemoryCursorStore:
    """Return a store in memory with the positions of that time. The given store stays as it is.

    Raises `StoreError` where the journal does not reach back, `typer.BadParameter` for a store
    without a journal.
    """
    async with open_store(spec, create=False) as store:
        if not isinstance(store, JournalledStore):
            raise typer.BadParameter("--from TIME: this kind of store keeps no journal")
        then = await store.positions_at(key, when)
    check_rewind(key, when, then)
    copy = MemoryCursorStore()
    # The first revision: for this store they are new.
    await copy.save(key, {id: type(p)(p.cursor, p.status) for id, p in then.items()})
    return copy
