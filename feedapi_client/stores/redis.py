"""Cursors in Redis. Needs the extra ``redis``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import orjson

try:
    import redis.asyncio as aioredis
except ImportError as error:
    raise ImportError(
        "RedisCursorStore needs redis-py: pip install 'feedapi-client[redis]'"
    ) from error

from feedapi_client.causes import store_problem
from feedapi_client.errors import FeedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import (
    Closable,
    asyncio_operation,
    check_storable,
    fenced,
    replace_positions,
    stored_key,
    stored_position,
)
from feedapi_client.stores.leases import KEPT_SECONDS, SECOND, Instance, Lease, View, change_number
from feedapi_client.stores.moving import already_stored, check_moves, moved_positions
from feedapi_client.stores.stored_format import STORE_FORMAT, check_format

# KEYS[1]: the feed's hash. ARGV[1]: the feed as JSON; then for each position: partition, the
# revision that must be stored (0: none), the new value.
# All positions are checked before one is written, and Redis runs one script at a time. Returns an
# empty list, or partition and stored revision of the first position that is refused. One that is
# stored already is this very save: redis-py repeats a command whose reply was lost.
_SAVE_SCRIPT = """
for i = 2, #ARGV, 3 do
    local stored = redis.call('HGET', KEYS[1], ARGV[i])
    local revision = stored and string.match(stored, '^%d+') or '0'
    if revision ~= ARGV[i + 1] and stored ~= ARGV[i + 2] then
        return {ARGV[i], revision}
    end
end
for i = 2, #ARGV, 3 do
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
end
redis.call('HSET', KEYS[1], 'feed', ARGV[1])
return {}
"""

# KEYS[1]: the feed's hash. ARGV: partitions. The hash is deleted with its last position.
_DELETE_SCRIPT = """
for i = 1, #ARGV do
    redis.call('HDEL', KEYS[1], ARGV[i])
end
if redis.call('HLEN', KEYS[1]) == 1 and redis.call('HEXISTS', KEYS[1], 'feed') == 1 then
    redis.call('DEL', KEYS[1])
end
return 0
"""

# KEYS: pairs of an old and a new hash. ARGV[1]: "1" to overwrite; ARGV[2]: the step to the new
# revisions; then for each pair the new feed as JSON. Returns {"refused", number of the pair} or
# {"moved"}. All pairs are checked before one is written.
_MOVE_SCRIPT = """
for pair = 1, #KEYS / 2 do
    local old, new = KEYS[2 * pair - 1], KEYS[2 * pair]
    if ARGV[1] ~= '1' and redis.call('EXISTS', old) == 1 and redis.call('EXISTS', new) == 1 then
        return {'refused', pair}
    end
end
for pair = 1, #KEYS / 2 do
    local old, new = KEYS[2 * pair - 1], KEYS[2 * pair]
    local fields = redis.call('HGETALL', old)
    if #fields > 0 then
        local moved = {'feed', ARGV[pair + 2]}
        for i = 1, #fields, 2 do
            if fields[i] ~= 'feed' then
                local revision, rest = string.match(fields[i + 1], '^(%d+)(.*)$')
                local stored = redis.call('HGET', new, fields[i])
                local other = stored and string.match(stored, '^%d+') or '0'
                local above = math.max(tonumber(revision), tonumber(other)) + tonumber(ARGV[2])
                moved[#moved + 1] = fields[i]
                moved[#moved + 1] = string.format('%.0f', above) .. rest
            end
        end
        redis.call('DEL', old, new)
        for i = 1, #moved, 2 do
            redis.call('HSET', new, moved[i], moved[i + 1])
        end
    end
end
return {'moved'}
"""

# KEYS[1]: instances, KEYS[2]: leases. ARGV[1]: the name of an instance.
_LEASES = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local function number(value) return string.format('%.0f', value) end
local function heartbeat(name)
    local found = redis.call('HGET', KEYS[1], name)
    if not found then return nil end
    local joined, expires, changes, options = string.match(found, '^(%d+) (%d+) (%d+) (.*)$')
    return {joined = tonumber(joined), expires = tonumber(expires), changes = tonumber(changes),
        options = options}
end
local function beat(name, h)
    local times = number(h.joined) .. ' ' .. number(h.expires)
    redis.call('HSET', KEYS[1], name, times .. ' ' .. number(h.changes) .. ' ' .. h.options)
end
local function alive(name)
    local found = heartbeat(name)
    return found ~= nil and found.expires > now
end
local function lease(partition)
    local found = redis.call('HGET', KEYS[2], partition)
    if not found then return nil end
    local epoch, ended, owner = string.match(found, '^(%d+) (%d) %d+ (.*)$')
    return {epoch = tonumber(epoch), ended = ended, owner = owner}
end
local function keep(partition, epoch, ended, owner)
    local value = number(epoch) .. ' ' .. ended .. ' ' .. number(now) .. ' ' .. owner
    redis.call('HSET', KEYS[2], partition, value)
end
"""
# ARGV: the instance, the length of its lease, for how long the dead are kept, its first number of
# changes, options.
_BEAT_SCRIPT = """
local mine = heartbeat(ARGV[1])
local lives = mine ~= nil and mine.expires > now
local expires = now + tonumber(ARGV[2])
if lives then
    mine.expires = expires
    beat(ARGV[1], mine)
    return 1
end
local others = false
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
    local found = heartbeat(name)
    if found.expires < now - tonumber(ARGV[3]) then
        redis.call('HDEL', KEYS[1], name)
    elseif found.expires > now then
        others = true
    end
end
if not others then
    for _, partition in ipairs(redis.call('HKEYS', KEYS[2])) do
        local found = lease(partition)
        if found.ended == '1' then
            keep(partition, found.epoch, '0', found.owner)
        end
    end
end
local joined = mine and mine.joined or now
beat(ARGV[1], {joined = joined, expires = expires, changes = tonumber(ARGV[4]), options = ARGV[5]})
return 0
"""
# ARGV: the instance, a step of its number of changes, then partition, epoch, "1" for an end, and
# owner of each lease. Returns the partitions of those that are stored as given.
_PUT_SCRIPT = """
local put, mine = {}, heartbeat(ARGV[1])
if not mine or mine.expires <= now then return put end
for i = 3, #ARGV, 4 do
    local found = lease(ARGV[i]) or {epoch = 0, owner = ''}
    local own, step = found.owner == ARGV[1], tonumber(ARGV[i + 1]) - found.epoch
    local free = own or not alive(found.owner)
    if (own and step == 0) or (free and step == 1) then
        keep(ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], ARGV[i + 3])
        put[#put + 1] = ARGV[i]
    end
end
mine.changes = mine.changes + tonumber(ARGV[2])
beat(ARGV[1], mine)
return put
"""
# ARGV: the instance.
_LEAVE_SCRIPT = """
for _, partition in ipairs(redis.call('HKEYS', KEYS[2])) do
    local found = lease(partition)
    if found.owner == ARGV[1] then
        keep(partition, found.epoch, found.ended, '')
    end
end
redis.call('HDEL', KEYS[1], ARGV[1])
return 1
"""
# ARGV: the number of one of the hashes. Returns it, and the time.
_LOOK_SCRIPT = """
return {number(now), redis.call('HGETALL', KEYS[tonumber(ARGV[1])])}
"""

_FEED_FIELD = "feed"
_CODES = {
    "BusyLoadingError": "LOADING",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "MovedError": "MOVED",
    "NoPermissionError": "NOPERM",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
}
"""Of the errors whose class says it."""


class RedisCursorStore(Closable):
    """Keeps positions in Redis.

    Each feed has one hash, whose name is `prefix` and `FeedKey.id`. It has a field for each
    partition (``revision status cursor``) and the field ``feed``, which holds the feed key and the
    version of the format as JSON. A save is one Lua script: atomic, and one round trip whatever the
    number of positions.

    Leases are in two more hashes, in one slot of a cluster: the instances (``joined expires changes
    options``) and the leases (``epoch ended changed owner``). Times are those of Redis. Nothing
    expires by itself: an epoch must not be forgotten. A failover of Redis can lose the last writes:
    of leases, which costs work, and of cursors, which repeats events.

    Redis takes no part in the transactions of another database: `save` raises `StoreError` if a
    transaction is given. A consumer that crashes between its effects and the commit gets the batch
    again: *at least once*. For exactly once, keep the cursors where the effects are.

    Configure Redis with persistence (``appendonly yes``) and ``maxmemory-policy noeviction``.
    Without its cursors a consumer starts from the beginning.

    redis-py repeats a command whose connection broke. A save that had arrived all the same is known
    by what is stored: the revision is drawn, so that no other save has it.

    Runs on asyncio only: on trio every operation raises `StoreError`.

    Arguments:
        client: a `redis.asyncio.Redis` or `RedisCluster`, which stays the caller's; or a URL, for
            which the store has a client of its own that `aclose` closes.
        prefix: the beginning of the names of all keys.
        timeout: maximum time for one operation, in seconds.

    Cancellation: a save that has begun is finished.
    """

    def __init__(self, client: Any, *, prefix: str = "feedapi:", timeout: float = 30.0) -> None:
        self._owned = isinstance(client, str)
        self._client: Any = aioredis.Redis.from_url(client) if isinstance(client, str) else client
        if not hasattr(self._client, "register_script") or isinstance(
            self._client, _sync_clients()
        ):
            raise TypeError(
                "RedisCursorStore needs a redis.asyncio client or a URL, "
                f"not a {type(client).__name__}"
            )
        self._prefix = prefix
        self._timeout = timeout
        self._save = self._client.register_script(_SAVE_SCRIPT)
        self._delete = self._client.register_script(_DELETE_SCRIPT)
        self._move = self._client.register_script(_MOVE_SCRIPT)
        self._lease_scripts = {
            script: self._client.register_script(_LEASES + script)
            for script in (_LOOK_SCRIPT, _BEAT_SCRIPT, _PUT_SCRIPT, _LEAVE_SCRIPT)
        }

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""
        async with self._operation(feed):
            fields = await self._client.hgetall(self._key(feed))
            texts = {text_of(name): text_of(value) for name, value in fields.items()}
            if (described := texts.pop(_FEED_FIELD, None)) is not None:
                version = orjson.loads(described).get("format")
                check_format("these cursors in Redis", version, STORE_FORMAT, feed)
            return {int(name): _position(feed, int(name), text) for name, text in texts.items()}

    async def save(
        self, feed: FeedKey, positions: Mapping[int, Position], *, transaction: Any = None
    ) -> None:
        """See `CursorStore.save`. Raises `StoreError` if a transaction is given."""
        if transaction is not None:
            raise StoreError(
                "RedisCursorStore can't take part in a transaction: "
                "keep the cursors in the database that the effects go to",
                feed=feed.url,
            )
        if not positions:
            return
        check_storable(feed, positions)
        async with self._operation(feed):
            arguments = [_description(feed)]
            for partition, new in positions.items():
                arguments += [
                    b"%d" % partition,
                    b"%d" % (new.replaces or 0),
                    f"{new.revision} {new.status} {new.cursor}".encode(),
                ]
            refused = await self._save(keys=[self._key(feed)], args=arguments)
        if refused:
            partition, stored = int(refused[0]), int(refused[1])
            raise fenced(feed, partition, positions[partition].replaces, stored or None)

    async def feeds(self) -> list[FeedKey]:
        """See `AdministrableStore.feeds`. Scans the names of all keys of the database."""
        found = set()
        async with self._operation(None):
            pattern = _escape_pattern(self._prefix) + "*"
            async for key in self._client.scan_iter(match=pattern, count=1000):
                if (text := await self._described(key)) is not None:
                    described = orjson.loads(text)
                    filters = orjson.dumps(described["filters"]).decode()
                    found.add(stored_key(described["url"], described["name"], filters))
        return sorted(found, key=str)

    async def delete(self, feed: FeedKey, partitions: Iterable[int] | None = None) -> None:
        """See `AdministrableStore.delete`."""
        async with self._operation(feed):
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

    async def move(
        self, keys: Mapping[FeedKey, FeedKey], *, overwrite: bool = False
    ) -> dict[FeedKey, dict[int, Position]]:
        """See `AdministrableStore.move`.

        On a cluster, which holds keys in several places, one key after the other: after an error
        some may be moved. Call it again for the others.
        """
        check_moves(keys)
        pairs = [(old, new) for old, new in keys.items() if await self.load(old)]
        if not pairs:
            return {}
        if isinstance(self._client, aioredis.RedisCluster):
            return await self._move_between_slots(pairs, overwrite=overwrite)
        step = Position.after(None, "").revision
        async with self._operation(None):
            answer = await self._move(
                keys=[self._key(key) for pair in pairs for key in pair],
                args=[b"1" if overwrite else b"0", step, *(_description(new) for _, new in pairs)],
            )
        if text_of(answer[0]) == "refused":
            raise already_stored(pairs[int(answer[1]) - 1][1])
        return {new: await self.load(new) for _, new in pairs}

    async def _move_between_slots(
        self, pairs: Sequence[tuple[FeedKey, FeedKey]], *, overwrite: bool
    ) -> dict[FeedKey, dict[int, Position]]:
        taken = {new: await self.load(new) for _, new in pairs}
        if any(taken.values()) and not overwrite:
            raise already_stored(next(new for new, stored in taken.items() if stored))
        moved = {}
        for old, new in pairs:
            # A consumer of the old key is refused from here on.
            positions = await self.replace(old, await self.load(old))
            moved[new] = moved_positions(new, positions, taken[new], overwrite=overwrite)
            if taken[new]:
                await self.delete(new)
            await self.save(new, moved[new])  # refused where another instance was faster
            await self.delete(old)
        return moved

    async def look(self, feed: FeedKey, last: View | None = None) -> View:
        """See `LeaseStore.look`."""
        now, rows = await self._hash(feed, 1)
        instances = []
        for name, value in sorted(rows.items()):
            joined, expires, changes, options = value.split(" ", 3)
            left, age = (int(expires) - now) / SECOND, (now - int(joined)) / SECOND
            instances.append(Instance(name, left, age, int(changes), options))
        if last is not None and last.repeats(instances):
            return View(instances, last.leases)
        now, rows = await self._hash(feed, 2)
        leases = {}
        for partition, value in sorted((int(name), value) for name, value in rows.items()):
            epoch, ended, changed, owner = value.split(" ", 3)
            age = (now - int(changed)) / SECOND
            leases[partition] = Lease(partition, owner or None, int(epoch), ended == "1", age)
        return View(instances, leases)

    async def beat(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> bool:
        """See `LeaseStore.beat`."""
        length, kept = int(seconds * SECOND), KEPT_SECONDS * SECOND
        arguments = (instance, length, kept, change_number(40), options)
        return bool(await self._lease(_BEAT_SCRIPT, feed, *arguments))

    async def put(self, feed: FeedKey, instance: str, leases: Collection[Lease]) -> set[int]:
        """See `LeaseStore.put`."""
        arguments: list[str | int] = [instance, change_number()]
        for lease in leases:
            arguments += [lease.partition, lease.epoch, int(lease.ended), lease.owner or ""]
        return {int(each) for each in await self._lease(_PUT_SCRIPT, feed, *arguments)}

    async def leave(self, feed: FeedKey, instance: str) -> None:
        """See `LeaseStore.leave`."""
        await self._lease(_LEAVE_SCRIPT, feed, instance)

    async def _hash(self, feed: FeedKey, number: int) -> tuple[int, dict[str, str]]:
        """Return the time, and the instances (1) or the leases (2)."""
        now, fields = await self._lease(_LOOK_SCRIPT, feed, number)
        texts = [text_of(field) for field in fields]
        return int(now), dict(zip(texts[::2], texts[1::2], strict=True))

    async def _lease(self, script: str, feed: FeedKey, *arguments: str | int) -> Any:
        name = f"{self._prefix}{{{feed.id}}}"
        async with self._operation(feed):
            return await self._lease_scripts[script](
                keys=[f"{name}:instances", f"{name}:leases"],
                args=[str(argument).encode() for argument in arguments],
            )

    async def aclose(self) -> None:
        """See `Closable.aclose`."""
        if self._owned:
            with anyio.CancelScope(shield=True):
                await self._client.aclose()

    def _key(self, feed: FeedKey) -> str:
        return f"{self._prefix}{feed.id}"

    async def _described(self, key: Any) -> Any:
        # A key of another application may begin with the prefix, too.
        if text_of(await self._client.type(key)) != "hash":
            return None
        return await self._client.hget(key, _FEED_FIELD)

    @asynccontextmanager
    async def _operation(self, feed: FeedKey | None) -> AsyncIterator[None]:
        """Run the block as `asyncio_operation` does, and translate Redis' errors."""
        try:
            async with asyncio_operation("RedisCursorStore", "Redis", feed, self._timeout):
                yield
        except FeedError:
            raise
        except Exception as error:
            # Any: redis-py raises also TypeError and RuntimeError, and a value that another program
            # wrote raises ValueError.
            # Only the name of the error: its text can quote the command. The cause is chained.
            raise StoreError(
                f"Redis failed: {type(error).__name__}{_error_code(error)}{_problem(error)}",
                feed=None if feed is None else feed.url,
            ) from error

    def __repr__(self) -> str:
        return f"<RedisCursorStore, prefix {self._prefix!r}>"


def text_of(value: Any) -> str:
    """Return a text of Redis: the caller's client may or may not decode responses."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _sync_clients() -> tuple[type, ...]:
    import redis

    return (redis.Redis, redis.RedisCluster)


def _position(feed: FeedKey, partition: int, value: str) -> Position:
    revision, status, cursor = value.split(" ", 2)
    return stored_position(feed, partition, cursor, status, int(revision))


def _description(feed: FeedKey) -> bytes:
    """Return the field ``feed`` of the feed's hash."""
    key = {"url": feed.url, "name": feed.name, "filters": feed.filters}
    return orjson.dumps({**key, "format": STORE_FORMAT})


def _escape_pattern(prefix: str) -> str:
    return "".join(f"\\{letter}" if letter in "*?[]\\^" else letter for letter in prefix)


def _problem(error: Exception) -> str:
    problem = store_problem(error)
    return "" if problem is None else f": {problem}"


def _error_code(error: Exception) -> str:
    """Return the code that Redis has given an error, if it has: ``READONLY``, ``OOM``."""
    text = str(error)
    first = text.split(maxsplit=1)[0] if text else ""
    # redis-py takes the codes that it knows off the text. Versions before 6 keep them nowhere.
    code = getattr(error, "status_code", None) or _CODES.get(type(error).__name__, first)
    return f" ({code})" if code.isupper() else ""
