"""Cursors in Redis. Needs the extra ``redis``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
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
from feedapi_client.errors import StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.base import (
    Answering,
    check_storable,
    consumer_interferes,
    fenced,
    stored_key,
    stored_position,
)
from feedapi_client.stores.leases import KEPT_SECONDS, SECOND, Instance, Lease, View, change_number
from feedapi_client.stores.moving import Administered, Edit, Stored
from feedapi_client.stores.tables import STORE_FORMAT, check_format

# KEYS: hashes of feeds. ARGV, for each of them: the feed as JSON; how many positions it must hold
# (-1: any number); how many change; then of each: partition, the revision that must be stored (0:
# none), the new value (empty: none any more).
# All is checked before anything is written, and Redis runs one script at a time. Returns an empty
# list, or partition and stored revision of what is refused. A position that is stored already is
# this very save: redis-py repeats a command whose reply was lost. The hash is deleted with its last
# position.
_CHANGE_SCRIPT = """
local function positions(hash)
    return redis.call('HLEN', hash) - redis.call('HEXISTS', hash, 'feed')
end
for _, writes in ipairs({false, true}) do
    local at = 1
    for _, hash in ipairs(KEYS) do
        local last = at + 2 + 3 * tonumber(ARGV[at + 2])
        if not writes and ARGV[at + 1] ~= '-1' and positions(hash) ~= tonumber(ARGV[at + 1]) then
            return {'-1', '0'}
        end
        for i = at + 3, last, 3 do
            local stored, value = redis.call('HGET', hash, ARGV[i]), ARGV[i + 2]
            local revision = stored and string.match(stored, '^%d+') or '0'
            if writes and value == '' then
                redis.call('HDEL', hash, ARGV[i])
            elseif writes then
                redis.call('HSET', hash, ARGV[i], value)
            elseif revision ~= ARGV[i + 1] and stored ~= value then
                return {ARGV[i], revision}
            end
        end
        if writes and positions(hash) == 0 then
            redis.call('DEL', hash)
        elseif writes then
            redis.call('HSET', hash, 'feed', ARGV[at])
        end
        at = last + 1
    end
end
return {}
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
    return {joined = tonumber(joined), expires = tonumber(expires), changes = changes,
            options = options}
end
local function beat(name, h)
    local times = number(h.joined) .. ' ' .. number(h.expires)
    redis.call('HSET', KEYS[1], name, times .. ' ' .. h.changes .. ' ' .. h.options)
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
# ARGV: the instance, the length of its lease, for how long the dead are kept, options, changes.
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
beat(ARGV[1], {joined = joined, expires = expires, options = ARGV[4], changes = ARGV[5]})
return 0
"""
# ARGV: the instance, its changes, then partition, epoch, "1" for an end, and owner of each lease.
# Returns the partitions of those that are stored as given.
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
mine.changes = ARGV[2]
beat(ARGV[1], mine)
return put
"""
# ARGV: which of the KEYS.
_LOOK_SCRIPT = """
return {number(now), redis.call('HGETALL', KEYS[tonumber(ARGV[1])])}
"""

_FEED_FIELD = "feed"
_CHANGE_ATTEMPTS = 500
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


class RedisCursorStore(Administered):
    """Keeps positions in Redis, and leases.

    A save is one Lua script: atomic, and one round trip. The formats are in the documentation.
    A cluster holds keys in several places: `move` moves one after the other there. After an error
    some may be moved; call it again for the others.

    Redis takes no part in the transactions of another database: `save` raises `StoreError` if a
    transaction is given. A consumer that crashes between its effects and the commit gets the batch
    again: *at least once*.

    Configure Redis with persistence (``appendonly yes``) and ``maxmemory-policy noeviction``.
    Without its cursors a consumer starts from the beginning. A failover can lose the last writes:
    of leases, which costs work, and of cursors, which repeats events.

    Runs on asyncio only.

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
        if not isinstance(self._client, (aioredis.Redis, aioredis.RedisCluster)):
            raise TypeError(
                "RedisCursorStore needs a redis.asyncio client or a URL, "
                f"not a {type(client).__name__}"
            )
        self._prefix = prefix
        self._server = _Server(timeout)
        self._scripts = {
            script: self._client.register_script(before + script)
            for before, script in (
                ("", _CHANGE_SCRIPT),
                (_LEASES, _LOOK_SCRIPT),
                (_LEASES, _BEAT_SCRIPT),
                (_LEASES, _PUT_SCRIPT),
            )
        }

    async def load(self, feed: FeedKey) -> dict[int, Position]:
        """See `CursorStore.load`."""

        async def load() -> dict[int, Position]:
            fields = await self._client.hgetall(self._key(feed))
            texts = {text_of(name): text_of(value) for name, value in fields.items()}
            if (described := texts.pop(_FEED_FIELD, None)) is not None:
                version = orjson.loads(described).get("format")
                check_format("these cursors in Redis", version, STORE_FORMAT, feed)
            return {int(name): _position(feed, int(name), text) for name, text in texts.items()}

        return await self._server.answer("Redis", feed, load)

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
        check_storable(feed, positions)
        if not positions:
            return
        changes = {partition: (new.replaces, new) for partition, new in positions.items()}
        if refused := await self._write({feed: (-1, changes)}):
            partition, stored = refused
            raise fenced(feed, partition, positions[partition].replaces, stored or None)

    async def feeds(self) -> list[FeedKey]:
        """See `AdministrableStore.feeds`. Scans the names of all keys of the database."""

        async def scan() -> list[FeedKey]:
            found = set()
            pattern = _escape_pattern(self._prefix) + "*"
            async for key in self._client.scan_iter(match=pattern, count=1000):
                # A key of another application may begin with the prefix, too.
                if text_of(await self._client.type(key)) != "hash":
                    continue
                if (text := await self._client.hget(key, _FEED_FIELD)) is not None:
                    described = orjson.loads(text)
                    filters = orjson.dumps(described["filters"]).decode()
                    found.add(stored_key(described["url"], described["name"], filters))
            return sorted(found, key=str)

        return await self._server.answer("Redis", None, scan)

    async def look(self, feed: FeedKey, last: View | None = None) -> View:
        """See `LeaseStore.look`."""
        now, rows = await self._lease(_LOOK_SCRIPT, feed, 1)
        instances = []
        for name, value in sorted(_pairs(rows).items()):
            joined, expires, changes, options = value.split(" ", 3)
            left, age = (int(expires) - int(now)) / SECOND, (int(now) - int(joined)) / SECOND
            instances.append(Instance(name, left, age, options, int(changes)))
        if last is not None and last.repeats(instances):
            return View(instances, last.leases)
        now, rows = await self._lease(_LOOK_SCRIPT, feed, 2)
        leases = {}
        for partition, value in sorted((int(name), value) for name, value in _pairs(rows).items()):
            epoch, ended, changed, owner = value.split(" ", 3)
            age = (int(now) - int(changed)) / SECOND
            leases[partition] = Lease(partition, owner or None, int(epoch), ended == "1", age)
        return View(instances, leases)

    async def beat(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> bool:
        """See `LeaseStore.beat`."""
        length, kept = int(seconds * SECOND), KEPT_SECONDS * SECOND
        arguments = (instance, length, kept, options, change_number())
        return bool(await self._lease(_BEAT_SCRIPT, feed, *arguments))

    async def put(self, feed: FeedKey, instance: str, leases: Collection[Lease]) -> set[int]:
        """See `LeaseStore.put`."""
        arguments: list[str | int] = [instance, change_number()]
        for lease in leases:
            arguments += [lease.partition, lease.epoch, int(lease.ended), lease.owner or ""]
        return {int(each) for each in await self._lease(_PUT_SCRIPT, feed, *arguments)}

    async def leave(self, feed: FeedKey, instance: str) -> None:
        """See `LeaseStore.leave`."""
        own = [each for each in (await self.look(feed)).leases.values() if each.owner == instance]
        await self.put(feed, instance, [replace(each, owner=None) for each in own])
        instances, _ = self._lease_keys(feed)
        await self._server.answer("Redis", feed, lambda: self._client.hdel(instances, instance))

    async def aclose(self) -> None:
        """See `Closable.aclose`."""
        if self._owned:
            with anyio.CancelScope(shield=True):
                await self._client.aclose()

    async def _change(
        self,
        feeds: Collection[FeedKey],
        edit: Edit,
        *,
        forgets: Collection[int] | None = (),  # noqa: ARG002 - nothing is done ahead
        moves: Mapping[FeedKey, FeedKey] | None = None,
    ) -> Stored:
        if moves and isinstance(self._client, aioredis.RedisCluster):
            return await self._move_apart(edit, moves)
        for _ in range(_CHANGE_ATTEMPTS):
            stored = {feed: await self.load(feed) for feed in feeds}
            wanted = edit(stored)
            edits = {feed: _edited(stored[feed], new) for feed, new in wanted.items()}
            if not await self._write(edits):
                return wanted
        raise consumer_interferes(next(iter(feeds), None))

    async def _move_apart(self, edit: Edit, moves: Mapping[FeedKey, FeedKey]) -> Stored:
        feeds = [*moves, *moves.values()]
        edit({feed: await self.load(feed) for feed in feeds})  # refused before the first is moved
        done: Stored = {}
        for old, new in moves.items():
            # A consumer of the old key is refused from here on.
            if not (found := await self.replace(old, await self.load(old))):
                continue
            stored = await self.load(new)
            others = {feed: dict[int, Position]() for feed in feeds}
            one = edit({**others, old: found, new: stored})
            done[new] = one[new]
            if await self._write({new: _edited(stored, one[new])}):
                raise consumer_interferes(new)
            await self.delete(old)
        return done

    async def _write(
        self, edits: Mapping[FeedKey, tuple[int, Mapping[int, _Edit]]]
    ) -> tuple[int, int] | None:
        """All or none; return partition and stored revision of what is refused. -1: any number."""
        arguments: list[bytes | int] = []
        for feed, (size, changes) in edits.items():
            arguments += [_description(feed), size, len(changes)]
            for partition, (revision, new) in changes.items():
                value = b"" if new is None else f"{new.revision} {new.status} {new.cursor}".encode()
                arguments += [b"%d" % partition, revision or 0, value]
        keys = [self._key(feed) for feed in edits]
        first = next(iter(edits), None)
        refused = await self._run(_CHANGE_SCRIPT, first, keys, arguments) if edits else None
        return (int(refused[0]), int(refused[1])) if refused else None

    async def _lease(self, script: str, feed: FeedKey, *arguments: str | int) -> Any:
        texts = [str(argument).encode() for argument in arguments]
        return await self._run(script, feed, self._lease_keys(feed), texts)

    async def _run(self, script: str, feed: FeedKey | None, keys: Any, arguments: Any) -> Any:
        run = self._scripts[script]
        return await self._server.answer("Redis", feed, lambda: run(keys=keys, args=arguments))

    def _key(self, feed: FeedKey) -> str:
        return f"{self._prefix}{feed.id}"

    def _lease_keys(self, feed: FeedKey) -> list[str]:
        name = f"{self._prefix}{{{feed.id}}}"
        return [f"{name}:instances", f"{name}:leases"]

    def __repr__(self) -> str:
        return f"<RedisCursorStore, prefix {self._prefix!r}>"


class _Server(Answering):
    name = ""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def reason(self, error: Exception) -> str:
        """See `Answering.reason`: its text can quote the command."""
        # redis-py raises also TypeError and RuntimeError, and a value that another program wrote
        # raises ValueError.
        problem = store_problem(error)
        return f"{type(error).__name__}{_error_code(error)}{f': {problem}' if problem else ''}"


_Edit = tuple[int | None, Position | None]


def _edited(
    stored: Mapping[int, Position], wanted: Mapping[int, Position]
) -> tuple[int, dict[int, _Edit]]:
    changes: dict[int, _Edit] = {}
    for partition in stored.keys() | wanted.keys():
        found, new = stored.get(partition), wanted.get(partition)
        if found != new:
            changes[partition] = (None if found is None else found.revision, new)
    return len(stored), changes


def _pairs(fields: list[Any]) -> dict[str, str]:
    texts = [text_of(field) for field in fields]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def text_of(value: Any) -> str:
    """Return a text of Redis: the caller's client may or may not decode responses."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _position(feed: FeedKey, partition: int, value: str) -> Position:
    revision, status, cursor = value.split(" ", 2)
    return stored_position(feed, partition, cursor, status, int(revision))


def _description(feed: FeedKey) -> bytes:
    key = {"url": feed.url, "name": feed.name, "filters": feed.filters}
    return orjson.dumps({**key, "format": STORE_FORMAT})


def _escape_pattern(prefix: str) -> str:
    return "".join(f"\\{letter}" if letter in "*?[]\\^" else letter for letter in prefix)


def _error_code(error: Exception) -> str:
    text = str(error)
    first = text.split(maxsplit=1)[0] if text else ""
    # redis-py takes the codes that it knows off the text. Versions before 6 keep them nowhere.
    code = getattr(error, "status_code", None) or _CODES.get(type(error).__name__, first)
    return f" ({code})" if code.isupper() else ""
