from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest

from feedapi_client.testing import Publisher, faults
from tests.testing.virtual_time import HOUR, asgi_client, asgi_scope, run_in_virtual_time

FETCH = {"partition": 0, "cursor": "_first"}


@pytest.mark.anyio
async def test_the_publisher_is_an_asgi_application() -> None:
    publisher = Publisher(dialect="v2-draft", stream=True)
    publisher.append(0, {"n": 1})
    publisher.fail(faults.Trickle(piece=5))
    async with asgi_client(publisher) as http:
        assert (await http.get("/feed")).json() == publisher.discovery()
        trickled = await http.get("/feed", params=FETCH)
        streamed = await http.get("/feed", params={**FETCH, "stream": "20"})
    assert trickled.text == streamed.text


@pytest.mark.anyio
async def test_faults_of_the_connection_need_a_connection() -> None:
    publisher = Publisher()
    publisher.fail(faults.Reset(), on="any")
    async with asgi_client(publisher) as http:
        with pytest.raises((RuntimeError, BaseExceptionGroup)) as raised:
            await http.get("/feed")
    error = raised.value
    cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
    assert "Publisher.serve()" in str(cause)


@pytest.mark.anyio
@pytest.mark.parametrize("taken", [1, 3])
async def test_nothing_is_sent_ahead_of_a_client_that_does_not_read(taken: int) -> None:
    publisher = Publisher(dialect="v2-draft", stream=True, page_size=10)
    publisher.extend(0, [{"n": n} for n in range(1000)])
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == taken:
            await anyio.sleep_forever()

    scope = asgi_scope("/feed", "partition=0&cursor=_first&stream=y")
    async with anyio.create_task_group() as group:
        group.start_soon(publisher.asgi, scope, receive, send)
        await anyio.wait_all_tasks_blocked()
        assert len(sent) == taken
        group.cancel_scope.cancel()


def test_a_stream_is_held_open_as_long_as_asked_for() -> None:
    publisher = Publisher(dialect="v2-draft", stream=True)

    async def test() -> None:
        async with asgi_client(publisher) as http:
            started = anyio.current_time()
            response = await http.get("/feed", params={**FETCH, "stream": "3600000"})
            assert response.text.count("\n") == 1
            assert anyio.current_time() - started == pytest.approx(HOUR)

    run_in_virtual_time(test)


def test_a_delayed_response_comes_that_much_later() -> None:
    publisher = Publisher(dialect="v2-draft")
    publisher.fail(faults.Delay(HOUR))

    async def test() -> None:
        async with asgi_client(publisher) as http:
            started = anyio.current_time()
            assert (await http.get("/feed", params=FETCH)).status_code == 200
            assert anyio.current_time() - started == pytest.approx(HOUR)

    run_in_virtual_time(test)


def test_the_pieces_of_a_trickle_come_one_by_one() -> None:
    publisher = Publisher(dialect="v2-draft")
    publisher.append(0, {"n": 1})
    publisher.fail(faults.Trickle(piece=10, interval=60))

    async def test() -> None:
        async with asgi_client(publisher) as http:
            started = anyio.current_time()
            body = (await http.get("/feed", params=FETCH)).content
            pieces = -(-len(body) // 10)
            assert anyio.current_time() - started == pytest.approx(60 * pieces)

    run_in_virtual_time(test)


@pytest.mark.parametrize("after_lines", [None, 2])
def test_a_hanging_response_never_ends(after_lines: int | None) -> None:
    publisher = Publisher(dialect="v2-draft", checkpoint_every=2)
    publisher.extend(0, [{"n": n} for n in range(10)])
    publisher.fail(faults.Hang(after_lines=after_lines))

    async def test() -> None:
        async with asgi_client(publisher) as http:
            with anyio.move_on_after(HOUR) as waited:
                await http.get("/feed", params=FETCH)
        assert waited.cancelled_caught

    run_in_virtual_time(test)


@pytest.mark.anyio
async def test_other_scopes_than_http_are_left_alone() -> None:
    await Publisher().asgi({"type": "lifespan"}, None, None)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_the_publisher_itself_can_be_mounted() -> None:
    publisher = Publisher()
    transport = httpx.ASGITransport(publisher)
    async with httpx.AsyncClient(transport=transport) as http:
        assert (await http.get("http://feed/feed")).json() == publisher.discovery()
