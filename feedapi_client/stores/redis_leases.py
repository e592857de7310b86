"""Leases in Redis, beside the cursors. Needs the extra ``redis``.

Two hashes for each feed, in one slot of a cluster: the instances (``joined expires changes
options``) and the leases (``epoch ended changed owner``). Times are those of Redis, in
microseconds. Nothing expires by itself: an epoch must not be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from feedapi_client.model import FeedKey
from feedapi_client.stores.leases import Instance, Lease, first_change

_SECOND = 1_000_000
_KEPT_SECONDS = 3600
"""Dead instances are deleted after this time."""

# KEYS[1]: instances, KEYS[2]: leases. ARGV[1]: the name of an instance.
_COMMON = """
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
local function keep(partition, l)
    local value = number(l.epoch) .. ' ' .. l.ended .. ' ' .. number(now) .. ' ' .. l.owner
    redis.call('HSET', KEYS[2], partition, value)
end
local function changed(name)
    local found = heartbeat(name)
    if found then
        found.changes = found.changes + 1
        beat(name, found)
    end
end
"""
_JOIN = """
local others = false
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
    local found = heartbeat(name)
    if found.expires < now - tonumber(ARGV[3]) then
        redis.call('HDEL', KEYS[1], name)
    elseif name ~= ARGV[1] and found.expires > now then
        others = true
    end
end
if not others then
    for _, partition in ipairs(redis.call('HKEYS', KEYS[2])) do
        local found = lease(partition)
        if found.ended == '1' then
            found.ended = '0'
            keep(partition, found)
        end
    end
end
local mine = heartbeat(ARGV[1]) or {joined = now, changes = tonumber(ARGV[4])}
mine.expires = now + tonumber(ARGV[2])
mine.changes = mine.changes + 1
mine.options = ARGV[5]
beat(ARGV[1], mine)
return 1
"""
_RENEW = """
local mine = heartbeat(ARGV[1])
if not mine or mine.expires <= now then return 0 end
mine.expires = now + tonumber(ARGV[2])
beat(ARGV[1], mine)
return 1
"""
_LEAVE = """
for _, partition in ipairs(redis.call('HKEYS', KEYS[2])) do
    local found = lease(partition)
    if found.owner == ARGV[1] then
        found.owner = ''
        keep(partition, found)
    end
end
redis.call('HDEL', KEYS[1], ARGV[1])
return 1
"""
# ARGV: the instance, then partition and epoch of each claim. Returns the claimed ones.
_CLAIM = """
local claimed = {}
if not alive(ARGV[1]) then return claimed end
for i = 2, #ARGV, 2 do
    local found = lease(ARGV[i]) or {epoch = 0, ended = '0', owner = ''}
    local free = found.owner == '' or found.owner == ARGV[1] or not alive(found.owner)
    if free and found.epoch == tonumber(ARGV[i + 1]) then
        found.epoch = found.epoch + 1
        found.owner = ARGV[1]
        found.ended = '0'
        keep(ARGV[i], found)
        claimed[#claimed + 1] = ARGV[i]
    end
end
if #claimed > 0 then changed(ARGV[1]) end
return claimed
"""
# ARGV: the instance, "release" or "end", partitions.
_CHANGE = """
for i = 3, #ARGV do
    local found = lease(ARGV[i])
    if found and found.owner == ARGV[1] then
        if ARGV[2] == 'end' then found.ended = '1' else found.owner = '' end
        keep(ARGV[i], found)
    end
end
changed(ARGV[1])
return 1
"""
# The time, and one of the hashes.
_READ = """
return {number(now), redis.call('HGETALL', KEYS[tonumber(ARGV[1])])}
"""


class RedisLeases:
    """Implements `LeaseStore`. Each operation is one Lua script.

    A failover of Redis can lose the last writes: of leases, which costs work, and of cursors,
    which repeats events.
    """

    def __init__(
        self,
        client: Any,
        prefix: str,
        operation: Callable[[FeedKey | None], AbstractAsyncContextManager[None]],
    ) -> None:
        self._lease_prefix = prefix
        self._lease_operation = operation
        self._lease_scripts = {
            script: client.register_script(_COMMON + script)
            for script in (_JOIN, _RENEW, _LEAVE, _CLAIM, _CHANGE, _READ)
        }

    async def join(self, feed: FeedKey, instance: str, seconds: float, options: str = "") -> None:
        """See `LeaseStore.join`."""
        length, kept = int(seconds * _SECOND), _KEPT_SECONDS * _SECOND
        await self._call(_JOIN, feed, instance, length, kept, first_change(), options)

    async def renew(self, feed: FeedKey, instance: str, seconds: float) -> bool:
        """See `LeaseStore.renew`."""
        return bool(await self._call(_RENEW, feed, instance, int(seconds * _SECOND)))

    async def leave(self, feed: FeedKey, instance: str) -> None:
        """See `LeaseStore.leave`."""
        await self._call(_LEAVE, feed, instance)

    async def instances(self, feed: FeedKey) -> list[Instance]:
        """See `LeaseStore.instances`."""
        now, rows = await self._read(feed, 1)
        found = []
        for name, value in rows.items():
            joined, expires, changes, options = value.split(" ", 3)
            left, age = (int(expires) - now) / _SECOND, (now - int(joined)) / _SECOND
            found.append(Instance(name, left, age, int(changes), options))
        return sorted(found, key=lambda instance: instance.name)

    async def leases(self, feed: FeedKey) -> dict[int, Lease]:
        """See `LeaseStore.leases`."""
        now, rows = await self._read(feed, 2)
        found = {}
        for partition, value in rows.items():
            epoch, ended, changed, owner = value.split(" ", 3)
            age = (now - int(changed)) / _SECOND
            lease = Lease(int(partition), owner or None, int(epoch), ended == "1", age)
            found[lease.partition] = lease
        return dict(sorted(found.items()))

    async def claim(
        self, feed: FeedKey, instance: str, epochs: Mapping[int, int]
    ) -> dict[int, int]:
        """See `LeaseStore.claim`."""
        pairs = [value for pair in sorted(epochs.items()) for value in pair]
        claimed = await self._call(_CLAIM, feed, instance, *pairs)
        return {int(partition): epochs[int(partition)] + 1 for partition in claimed}

    async def release(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> None:
        """See `LeaseStore.release`."""
        await self._call(_CHANGE, feed, instance, "release", *partitions)

    async def end(self, feed: FeedKey, instance: str, partitions: Collection[int]) -> None:
        """See `LeaseStore.end`."""
        await self._call(_CHANGE, feed, instance, "end", *partitions)

    async def _read(self, feed: FeedKey, key: int) -> tuple[int, dict[str, str]]:
        now, fields = await self._call(_READ, feed, key)
        texts = [text_of(field) for field in fields]
        return int(now), dict(zip(texts[::2], texts[1::2], strict=True))

    async def _call(self, script: str, feed: FeedKey, *arguments: str | int) -> Any:
        name = f"{self._lease_prefix}{{{feed.id}}}"
        async with self._lease_operation(feed):
            return await self._lease_scripts[script](
                keys=[f"{name}:instances", f"{name}:leases"],
                args=[str(argument).encode() for argument in arguments],
            )


def text_of(value: Any) -> str:
    """Return a text of Redis: the caller's client may or may not decode responses."""
    return value.decode() if isinstance(value, bytes) else str(value)
