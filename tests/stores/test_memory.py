"""`MemoryCursorStore`: the contract."""

from __future__ import annotations

import pytest

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.sqlite import MemoryCursorStore
from tests.positions import counted


@pytest.mark.parametrize(
    ("stored", "why"),
    [
        (None, "the store went back: revision 3 can't be replaced because nothing is stored"),
        (2, "the store went back: revision 3 can't be replaced because revision 2 is stored"),
        (4, "another consumer named 'default' advanced this partition: revision 4 is stored"),
        (9, "another consumer named 'default' advanced this partition: revision 9 is stored"),
    ],
)
@pytest.mark.anyio
async def test_r17_a_refused_save_tells_a_store_that_went_back(
    stored: int | None, why: str
) -> None:
    store, key = MemoryCursorStore(), FeedKey("http://feed")
    if stored is not None:
        await store.save(key, {0: Position("a", revision=stored)})
    with pytest.raises(FencedError, match=why):
        await store.save(key, {0: counted("b", 4)})


@pytest.mark.anyio
@pytest.mark.parametrize(
    "key", [FeedKey("https://h/f", "a\ud800"), FeedKey("https://h/f", "a", {"filter-a": "\ud800"})]
)
async def test_a_key_that_is_no_text_is_a_store_error(key: FeedKey) -> None:
    with pytest.raises(StoreError, match="in memory failed"):
        await MemoryCursorStore().save(key, {0: Position("c")})
