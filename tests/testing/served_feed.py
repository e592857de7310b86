"""A plain httpx client of the protocol, and a small correct consumer.

Neither uses the library.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import httpx

from feedapi_client.testing import Publisher

TIMEOUT = 100.0
"""Time limit of a request in seconds. Only a safety net, below the time limit of a test."""


class ServedFeed:
    """A served publisher, and a client that speaks its dialect over real HTTP."""

    def __init__(self, publisher: Publisher, http: httpx.Client) -> None:
        assert publisher.url is not None
        self.publisher = publisher
        self.url = publisher.url
        self.http = http

    def discover(self) -> dict[str, Any]:
        response = self.http.get(self.url)
        assert response.status_code == 200, response.text
        return response.json()

    @property
    def partitions(self) -> list[dict[str, Any]]:
        """What discovery lists."""
        return self.discover()["partitions"]

    def fetch(self, partition: int = 0, cursor: str = "_first", **arguments: Any) -> httpx.Response:
        url, query = self.request(partition, cursor, **arguments)
        return self.http.get(url, params=query)

    def request(
        self, partition: int = 0, cursor: str = "_first", **arguments: Any
    ) -> tuple[str, dict[str, Any]]:
        """Return the URL and the query of a fetch. Underscores in names stand for hyphens."""
        dialect = self.publisher.dialect
        more = {name.replace("_", "-"): value for name, value in arguments.items()}
        if dialect == "v1":
            count = len(self.publisher.partitions)
            return self.url, {"n": count, f"cursor{partition}": cursor, **more}
        query = {"partition": partition, "cursor": cursor, **more}
        if dialect == "v2-draft":
            return self.url, query
        return self.url + "/events", {"token": self.publisher.token, **query}

    def read(
        self, partition: int = 0, cursor: str = "_first", **arguments: Any
    ) -> tuple[list[Any], str]:
        """Return the payloads and the last cursor of one response."""
        response = self.fetch(partition, cursor, **arguments)
        assert response.status_code == 200, response.text
        batches = parse(response.text)
        assert batches[-1][1] is not None
        return [event for events, _ in batches for event in events], batches[-1][1]

    def read_all(self, partition: int = 0, cursor: str = "_first", **arguments: Any) -> list[Any]:
        """Return the payloads up to the end, over as many responses as it takes."""
        found: list[Any] = []
        while True:
            events, then = self.read(partition, cursor, **arguments)
            found += events
            if not events and then == cursor:
                return found
            cursor = then

    def numbers(self, *arguments: Any, **more: Any) -> list[int]:
        """Return the field `n` of all payloads up to the end."""
        return [event["n"] for event in self.read_all(*arguments, **more)]

    @contextmanager
    def stream(self, stream: object = "y", **arguments: Any) -> Iterator[Iterator[Any]]:
        """Give the lines of a streamed response, decoded, as they arrive."""
        url, query = self.request(stream=stream, **arguments)
        with self.http.stream("GET", url, params=query) as response:
            assert response.status_code == 200
            yield map(json.loads, response.iter_lines())


def parse(text: str) -> list[tuple[list[Any], str | None]]:
    """Return (payloads, cursor) for each checkpoint. Events after the last one have None."""
    batches: list[tuple[list[Any], str | None]] = []
    events: list[Any] = []
    for line in text.split("\n")[:-1]:
        command = json.loads(line)
        if "cursor" in command:
            batches.append((events, command["cursor"]))
            events = []
        elif "data" in command or "event" in command:
            events.append(command["event"] if "event" in command else command["data"])
    return [*batches, (events, None)] if events else batches


class PlainConsumer:
    """Reads a whole feed correctly, in random steps.

    A step takes any partition that may be read, and any number of batches of its response.
    """

    def __init__(self, feed: ServedFeed, seed: int) -> None:
        self.feed = feed
        self.random = Random(seed)
        self.positions: dict[int, str] = {}
        self.drained: set[int] = set()
        self.seen: dict[Any, list[int]] = defaultdict(list)

    def step(self) -> bool:
        """Make one request. Return False when every listed partition is at its end."""
        listed = {int(found["id"]): found for found in self.feed.partitions}
        for id in self.random.sample(sorted(listed), len(listed)):
            parent = listed[id].get("startsAfterPartition")
            if (parent is None or int(parent) in self.drained) and self._advance(id, listed[id]):
                return True
        return False

    def finish(self) -> None:
        while self.step():
            pass

    def _advance(self, id: int, partition: dict[str, Any]) -> bool:
        readable_from = [id, *map(int, partition.get("cursorFromPartitions", ()))]
        asked = next((self.positions[p] for p in readable_from if p in self.positions), "_first")
        response = self.feed.fetch(id, asked)
        assert response.status_code == 200, response.text
        batches = parse(response.text)
        at_end = all(not events and cursor == asked for events, cursor in batches)
        closed = [(events, cursor) for events, cursor in batches if cursor is not None]
        for events, cursor in closed[: self.random.randint(1, len(closed))]:
            self.positions[id] = cursor
            for event in events:
                self.seen[event["entity"]].append(event["n"])
        newly_drained = partition.get("closed", False) and at_end and id not in self.drained
        if newly_drained:
            self.drained.add(id)
        return not at_end or newly_drained
