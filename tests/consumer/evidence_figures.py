"""Events and requests of consumers beside publishers and gateways of the field.

``python -m tests.consumer.evidence_figures`` prints a table, on virtual time. With an older version
of the library before this one on PYTHONPATH it prints what that did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import anyio
import httpx

from feedapi_client import FeedConsumer
from tests.consumer.scripted import Ask, Listed, Scripted, answers_for, in_time, lags, split

HORIZON = 900.0
"""Seconds after which a consumer that follows is stopped."""


class Case(NamedTuple):
    """One row: a feed, what is asked of the consumer, and whether it follows."""

    name: str
    feed: Callable[[], Scripted]
    options: dict[str, Any]


def with_answer(feed: Scripted, answer: Any) -> Scripted:
    feed.answers.append(answer)
    return feed


def older_end(feed: Scripted, ask: Ask) -> httpx.Response | None:
    """Half of all answers come from a replica that names its own older end, which grows slowly."""
    if ask.partition is None or len(feed.asks) % 2:
        return None
    end = 300 + int(ask.at) // 30
    if ask.cursor == "_first" or int(ask.cursor) < end:
        return feed.fetch(ask, visible=end)
    return httpx.Response(200, content=b'{"cursor":"%d"}\n' % end)


def other_key(feed: Scripted, ask: Ask) -> httpx.Response | None:
    if ask.partition is None:
        return None
    page = feed.fetch(ask)
    return httpx.Response(200, content=page.content.replace(b'"data"', b'"event"'))


def none_at_first(feed: Scripted, ask: Ask) -> httpx.Response | None:
    if ask.cursor == "_last":
        return httpx.Response(200, content=b'{"cursor":"1000"}\n')
    if len(feed.asks) > 2 or ask.partition is not None:
        return None
    return httpx.Response(200, content=b'{"token":"t","partitions":[]}')


def refused_once(feed: Scripted, ask: Ask) -> httpx.Response | None:
    return httpx.Response(401) if len(feed.fetches) == 2 and ask.partition is not None else None


def reply(body: bytes, status: int = 200) -> Callable[[], httpx.Response]:
    return lambda: httpx.Response(status, content=body)


def always(body: bytes) -> Any:
    return lambda feed, ask: None if ask.partition is None else httpx.Response(200, content=body)


def echoes_last(feed: Scripted, ask: Ask) -> httpx.Response | None:
    if ask.partition is None or ask.cursor != "_last":
        return None
    return httpx.Response(200, content=b'{"cursor":"_last"}\n')


STATUS, DISCOVERY = b'{"status":"maintenance"}\n', b'{"token":"t","partitions":[{"id":"0"}]}\n'
FOLLOW = {"follow": True}
CASES = (
    Case(
        "1 maintenance 0.6 s",
        lambda: with_answer(Scripted(split(1, 300)), answers_for(0.6, reply(STATUS))),
        {},
    ),
    Case(
        "1 empty 200 for 0.6 s",
        lambda: with_answer(Scripted(split(1, 300)), answers_for(0.6, reply(b""))),
        {},
    ),
    Case(
        "1 discovery for 1 s",
        lambda: with_answer(Scripted(split(1, 300)), answers_for(1.0, reply(DISCOVERY))),
        {},
    ),
    Case(
        "1 replica 1.5 s behind, echoing",
        lambda: with_answer(Scripted(split(1, 100), echo=True), lags(1.5, 60)),
        {},
    ),
    Case(
        "2 start=last, _last echoed",
        lambda: with_answer(Scripted({0: Listed(30)}, echo=True), echoes_last),
        {"start": "last"},
    ),
    Case(
        "3 event with a token",
        lambda: with_answer(Scripted({0: Listed(100)}, echo=True), other_key),
        {},
    ),
    Case(
        "4 every fetch a discovery",
        lambda: with_answer(Scripted({0: Listed(500)}), always(DISCOVERY)),
        {},
    ),
    Case(
        "5 one 204",
        lambda: with_answer(
            Scripted({0: Listed(500)}), answers_for(0.001, reply(b"", 204), after=0)
        ),
        {},
    ),
    Case(
        "5 one object without meaning",
        lambda: with_answer(Scripted({0: Listed(500)}), answers_for(0.001, reply(STATUS), after=0)),
        {},
    ),
    Case(
        "9 replica with an older end",
        lambda: with_answer(Scripted({0: Listed(400)}, echo=True, every=1), older_end),
        FOLLOW,
    ),
    Case(
        "11 empty first discovery, start=last",
        lambda: with_answer(Scripted({0: Listed(1000)}), none_at_first),
        {"start": "last", **FOLLOW},
    ),
    Case(
        "12 one 401", lambda: with_answer(Scripted({0: Listed(300)}, echo=True), refused_once), {}
    ),
    Case("five closed generations", lambda: Scripted(split(5, 100)), {}),
)


async def run(case: Case) -> str:
    """Return what came of one case."""
    feed, delivered, end = case.feed(), 0, "ends"
    distinct: set[tuple[int, int]] = set()
    began = anyio.current_time()

    async def read(consumer: FeedConsumer) -> None:
        nonlocal delivered
        async with consumer:
            async for event in consumer:
                delivered += 1
                distinct.add((event.partition, event.json()["n"]))

    try:
        with anyio.move_on_after(HORIZON) as scope:
            await read(feed.consumer(**case.options))
        if scope.cancelled_caught:
            end = "runs"
    except Exception as error:
        end = type(error).__name__
    seconds = anyio.current_time() - began
    published = sum(each.events for each in feed.partitions.values())
    return (
        f"{case.name:38} {delivered:6} delivered, {len(distinct):5} of {published:5}, "
        f"{len(feed.asks):6} requests, {seconds:7.1f} s, {end}"
    )


def main() -> None:
    """Print the table."""
    for case in CASES:

        async def body(case: Case = case) -> None:
            print(await run(case))

        in_time(body, "asyncio")


if __name__ == "__main__":
    import logging

    logging.disable()
    main()
