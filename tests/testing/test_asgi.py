from __future__ import annotations

from typing import Any

import anyio
import pytest

from feedapi_client.testing import Publisher, faults
from tests.testing.served_feed import parse
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


@pytest.mark.parametrize(
    ("fault", "stream", "seconds"),
    [
        (None, {"stream": "60000"}, 60),
        (faults.Delay(HOUR), {}, HOUR),
        (faults.Trickle(piece=10, interval=60), {}, 60 * 5),
    ],
)
def test_how_long_a_response_takes(fault: Any, stream: dict[str, str], seconds: float) -> None:
    publisher = Publisher(dialect="v2-draft", stream=True)
    publisher.append(0, {"n": 1})
    if fault is not None:
        publisher.fail(fault)

    async def test() -> None:
        async with asgi_client(publisher) as http:
            started = anyio.current_time()
            response = await http.get("/feed", params={**FETCH, **stream})
            assert anyio.current_time() - started == pytest.approx(seconds)
            assert parse(response.text) == [([{"n": 1}], publisher.end_cursor(0))]

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
