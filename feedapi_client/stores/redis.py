"""Cursors in Redis. Needs the extra ``redis``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import orjson

try:
    import redis.asyncio as aioredis
    from redis.exceptions import RedisError
except ImportError as error:
    raise ImportError(
        "RedisCursorStore needs redis-py: pip install 'feedapi-client[redis]'"
    ) from error

from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import Closable, fenced, replace_positions, stored_position

# KEYS[1]: the feed's hash. ARGV[1]: the feed, readable; then for each position: partition, the revision that must be stored (0: none), the new value.
# All is checked before anything is written, and a script runs alone. Returns an empty list, or partition and stored revision of the first refusal.
_SAVE = """
for i = 2, #ARGV, 3 do
    local stored = redis.call('HGET', KEYS[1], ARGV[i])
    local revision = stored and string.match(stored, '^%d+') or '0'
    if revision ~= ARGV[i + 1] then
        return {ARGV[i], revision}
    end
end
for i = 2, #ARGV, 3 do
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
end
redis.call('HSET', KEYS[1], 'feed', ARGV[1])
return {}
"""

# KEYS[1]: the feed's hash. ARGV: partitions. The hash goes with its last position.
_DELETE = """
for i = 1, #ARGV do
    redis.call('HDEL', KEYS[1], ARGV[i])
end
if redis.call('HLEN', KEYS[1]) == 1 and redis.call('HEXISTS', KEYS[1], 'feed') == 1 then
    redis.call('DEL', KEYS[1])
end
return 0
"""

_FEED_FIELD = "feed"


class RedisCursorStore(Closable):
    """Keeps positions in Redis: for each feed one hash, named `prefix` and `FeedKey.id`, with a field for each partition (``revision status cursor``) and
    the field ``feed`` that says in JSON which feed it is. A save is one Lua script, so it is atomic and one round trip whatever the number of positions.

    Redis takes no part in the transactions of another database: `save` raises `StoreError` when a transaction is given. A consumer that crashes between
    its effects and the commit gets the batch again: *at least once*. For exactly once keep the cursors where the effects are. Give Redis persistence
    (``appendonly yes``) and ``maxmemory-policy noeviction``: without its cursors a consumer starts anew. redis-py repeats a command whose connection
    broke: where the first one had arrived all the same, the save is refused as if by another consumer, and the consumer has to be started again.

    `client` is the caller's `redis.asyncio.Redis` or `RedisCluster` and stays the caller's, or a URL; then the store has a client of its own, which
    `aclose` closes. `timeout` (seconds) bounds each operation. A save that has begun is finished although its task is cancelled. asyncio only: on trio
    every operation raises `StoreError`.
    """

    def __init__(self, client: Any, *, prefix: str = "feedapi:", timeout: float = 30.0) -> None:
        self._owned = isinstance(client, str)
        self._client: Any = aioredis.Redis.from_url(client) if isinstance(client, str) else client
        if not hasattr(self._client, "register_script") or isinstance(
            self._client, _sync_clients()
        ):
            raise TypeError(
                f"RedisCursorStore needs a redis.asyncio client or a URL, not a {type(client).__name__}"
            )
        self._prefix = prefix
        self._timeout = timeout
        self._save = self._client.register_script(_SAVE)
        self._delete = self._client.register_script(_DELETE)

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        async with self._guard(feed):
            fields = await self._client.hgetall(self._key(feed))
        texts = ((_text(name), _text(value)) for name, value in fields.items())
        return {
            int(name): _position(feed, int(name), value)
            for name, value in texts
            if name != _FEED_FIELD
        }

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """See `CursorStore.save`. Raises `StoreError` when a transaction is given."""
        if transaction is not None:
            raise StoreError(
                "RedisCursorStore can't take part in a transaction: keep the cursors in the database that the effects go to",
                feed=feed.url,
            )
        if not positions:
            return
        async with self._guard(feed):
            arguments = [
                orjson.dumps({"url": feed.url, "name": feed.name, "filters": feed.filters})
            ]
            for partition, new in positions.items():
                arguments += [
                    b"%d" % partition,
                    b"%d" % (new.revision - 1),
                    f"{new.revision} {new.status} {new.cursor}".encode(),
                ]
            refused = await self._save(keys=[self._key(feed)], args=arguments)
        if refused:
            partition, stored = int(refused[0]), int(refused[1])
            raise fenced(feed, partition, positions[partition].revision, stored or None)

    async def feeds(self) -> list[FeedKey]:
        """See `AdministrableStore.feeds`. Goes over the names of all keys of the database."""
        found = set()
        async with self._guard(None):
            async for key in self._client.scan_iter(
                match=_literally(self._prefix) + "*", count=1000
            ):
                if (text := await self._described(key)) is not None:
                    described = orjson.loads(text)
                    found.add(FeedKey(described["url"], described["name"], described["filters"]))
        return sorted(found, key=str)

    async def delete(self, feed: FeedKey, partitions: Iterable[int] | None = None) -> None:
        """See `AdministrableStore.delete`."""
        async with self._guard(feed):
            if partitions is None:
                await self._client.delete(self._key(feed))
            else:
                await self._delete(
                    keys=[self._key(feed)], args=[b"%d" % partition for partition in partitions]
                )

    async def replace(
        self, feed: FeedKey, positions: Mapping[int, Position]
    ) -> dict[int, Position]:
        """See `AdministrableStore.replace`."""
        return await replace_positions(self, feed, positions)

    async def aclose(self) -> None:
        """See `Closable.aclose`."""
        if self._owned:
            with anyio.CancelScope(shield=True):
                await self._client.aclose()

    def _key(self, feed: FeedKey) -> str:
        return f"{self._prefix}{feed.id}"

    async def _described(self, key: Any) -> Any:
        # Another application's key may begin with the prefix, too.
        if _text(await self._client.type(key)) != "hash":
            return None
        return await self._client.hget(key, _FEED_FIELD)

    @asynccontextmanager
    async def _guard(self, feed: FeedKey | None) -> AsyncIterator[None]:
        """Within it cancellation waits, time is bounded, and foreign errors are translated. Cancelled before, it is not entered."""
        url = None if feed is None else feed.url
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise StoreError(
                "RedisCursorStore runs on asyncio only: on trio use SQLiteCursorStore", feed=url
            ) from None
        await anyio.lowlevel.checkpoint_if_cancelled()
        try:
            with anyio.fail_after(self._timeout, shield=True):
                yield
        except TimeoutError as error:
            raise StoreError(
                f"Redis did not answer within {self._timeout:g} s", feed=url
            ) from error
        except (RedisError, OSError, UnicodeError) as error:
            # Only the name of a foreign error, which can repeat the command and so much else; the cause is chained.
            raise StoreError(
                f"Redis failed: {type(error).__name__}{_hint(error)}", feed=url
            ) from error

    def __repr__(self) -> str:
        return f"<RedisCursorStore, prefix {self._prefix!r}>"


def _sync_clients() -> tuple[type, ...]:
    import redis

    return (redis.Redis, redis.RedisCluster)


def _position(feed: FeedKey, partition: int, value: str) -> Position:
    revision, status, cursor = value.split(" ", 2)
    return stored_position(feed, partition, cursor, status, int(revision))


def _text(value: Any) -> str:
    # The caller's client may or may not decode responses.
    return value.decode() if isinstance(value, bytes) else str(value)


def _literally(prefix: str) -> str:
    return "".join(f"\\{letter}" if letter in "*?[]\\^" else letter for letter in prefix)


def _hint(error: Exception) -> str:
    text = str(error)
    code = text.split(maxsplit=1)[0] if text else ""
    return f" ({code})" if code.isupper() else ""
