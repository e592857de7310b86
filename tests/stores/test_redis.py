"""`RedisCursorStore` on a real server: the contract, and the keys."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
import redis.asyncio
from redis._parsers.base import BaseParser
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from feedapi_client.errors import FencedError, StoreError
from feedapi_client.model import FeedKey, Position
from feedapi_client.stores.redis import RedisCursorStore
from feedapi_client.testing.contracts import advanced, opening
from tests.positions import counted, stand
from tests.servers import Redis, run_redis_cluster

pytestmark = pytest.mark.anyio
FEED = FeedKey("https://service.test/feed")


@pytest.fixture
def empty_redis(redis_server: Redis) -> Redis:
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server


class TestOnRedis:
    @pytest.fixture(params=["asyncio"])
    def anyio_backend(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    async def test_prefixes_are_apart(self, empty_redis: Redis) -> None:
        async with (
            RedisCursorStore(empty_redis.url, prefix="a*:") as first,
            RedisCursorStore(empty_redis.url, prefix="ab:") as second,
        ):
            await first.save(FEED, {0: Position("a")})
            assert await second.load(FEED) == {}
            assert (await first.feeds(), await second.feeds()) == ([FEED], [])

    async def test_r05_a_save_whose_reply_was_lost_is_repeated_by_redis_py(
        self, empty_redis: Redis
    ) -> None:
        other = RedisCursorStore(empty_redis.url)

        class LosesReplies(redis.asyncio.UnixDomainSocketConnection):
            lost = 0

            async def read_response(self, *arguments: Any, **more: Any) -> Any:
                response = await super().read_response(*arguments, **more)
                if self.lost < 1 and response == []:
                    LosesReplies.lost += 1
                    await other.save(FEED, {1: Position.after(None, "a")})
                    raise redis.ConnectionError("the reply was lost")
                return response

        pool = redis.asyncio.ConnectionPool(
            LosesReplies, path=empty_redis.socket, retry=Retry(NoBackoff(), 3)
        )
        async with redis.asyncio.Redis(connection_pool=pool) as client:
            store = RedisCursorStore(client)
            await store.save(FEED, {0: Position.after(None, "a")})
            with pytest.raises(FencedError):
                await store.save(FEED, {0: Position.after(None, "a")})
        await pool.aclose()
        await other.aclose()
        assert LosesReplies.lost == 1

    async def test_keys_of_others_are_not_feeds(self, empty_redis: Redis) -> None:
        with redis.Redis.from_url(empty_redis.url) as client:
            client.set("feedapi:note", "x")
            client.hset("feedapi:table", "a", "b")
        async with RedisCursorStore(empty_redis.url) as store:
            assert await store.feeds() == []

    async def test_a_key_of_another_kind_is_a_store_error(self, empty_redis: Redis) -> None:
        with redis.Redis.from_url(empty_redis.url) as client:
            client.set(f"feedapi:{FEED.id}", "x")
        async with RedisCursorStore(empty_redis.url) as store:
            with pytest.raises(StoreError, match="Redis failed"):
                await store.save(FEED, {0: Position("a")})

    async def test_a_save_survives_the_loss_of_the_script_cache(self, empty_redis: Redis) -> None:
        async with RedisCursorStore(empty_redis.url) as store:
            await store.save(FEED, {0: Position("a")})
            with redis.Redis.from_url(empty_redis.url) as client:
                client.script_flush()
            await store.save(FEED, {0: counted("b", 2)})
            assert await store.load(FEED) == {0: counted("b", 2)}

    async def test_a_server_that_does_not_answer_is_a_store_error(self, empty_redis: Redis) -> None:
        with redis.Redis.from_url(empty_redis.url) as client:
            # Only writing commands wait, so that the pause can be ended.
            client.client_pause(600_000, all=False)
            async with RedisCursorStore(empty_redis.url, timeout=0.1) as store:
                with pytest.raises(StoreError, match=re.escape("did not answer within 0.1 s")):
                    await store.save(FEED, {0: Position("a")})
            client.client_unpause()
        async with RedisCursorStore(empty_redis.url) as store:
            await store.load(FEED)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    "said",
    [
        "READONLY You can't write against a read only replica.",
        "OOM command not allowed when used memory > 'maxmemory'.",
        "NOREPLICAS Not enough good replicas to write.",
        "WRONGPASS invalid username-password pair or user is disabled.",
        "NOPERM User default has no permissions to run the 'evalsha' command",
        "MISCONF Redis is configured to save RDB snapshots",
        "LOADING Redis is loading the dataset in memory",
        "CLUSTERDOWN Hash slot not served",
        "MOVED 3999 127.0.0.1:6381",
    ],
)
async def test_the_code_of_redis_is_in_the_message(said: str, anyio_backend: str) -> None:
    code = said.partition(" ")[0]
    error = BaseParser.parse_error(said)

    async def fails(*arguments: Any, **more: Any) -> Any:
        raise error

    client = redis.asyncio.Redis()
    client.hgetall = fails  # type: ignore[method-assign]
    with pytest.raises(StoreError, match=code):
        await RedisCursorStore(client).load(FEED)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_another_program_wrote_is_a_store_error(
    empty_redis: Redis, anyio_backend: str
) -> None:
    async with RedisCursorStore(empty_redis.url) as store:
        await store.save(FEED, {0: Position("c")})
        with redis.Redis.from_url(empty_redis.url) as client:
            client.hset(f"feedapi:{FEED.id}", "1", "written by another program")
        with pytest.raises(StoreError, match="ValueError") as failed:
            await store.load(FEED)
        assert isinstance(failed.value.__cause__, ValueError)
        assert failed.value.feed == FEED.url


@pytest.fixture
async def cluster() -> AsyncIterator[redis.asyncio.RedisCluster]:
    """A cluster of one node, which refuses commands over several slots as any other does."""
    with run_redis_cluster() as port:
        client = redis.asyncio.RedisCluster(host="127.0.0.1", port=port)
        yield client
        await client.aclose()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_cursors_move_between_the_slots_of_a_cluster(
    cluster: redis.asyncio.RedisCluster, anyio_backend: str
) -> None:
    store = RedisCursorStore(cluster)
    named, taken = FeedKey.named("payments"), FeedKey(FEED.url, "taken")
    positions = opening(range(3))
    await store.save(FEED, positions)
    await store.save(taken, opening())
    with pytest.raises(StoreError, match="has cursors already"):
        await store.move({FEED: taken})
    assert await store.load(FEED) == positions

    moved = await store.move({FEED: named})
    assert stand(moved[named]) == stand(positions)
    assert await store.load(named) == moved[named]
    assert set(await store.feeds()) == {named, taken}
    with pytest.raises(FencedError):
        await store.save(FEED, advanced(positions))

    await store.move({named: taken}, overwrite=True)
    assert stand(await store.load(taken)) == stand(positions)
    assert await store.feeds() == [taken]
