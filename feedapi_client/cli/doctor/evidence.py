"""What an examination has found: responses, without a judgement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from feedapi_client.cli.doctor.probe_messages import ProbeResponse
from feedapi_client.cli.doctor.wire_page import WirePage
from feedapi_client.errors import FeedError
from feedapi_client.model import FIRST, DialectName, FeedInfo, Partition
from feedapi_client.protocol.negotiation import negotiate


@dataclass(slots=True)
class WireDiscovery:
    """One response to the argument-less GET, read with and without tolerance.

    Attributes:
        answer: the response.
        document: its JSON object; None when it is none.
        info: what a consumer of this library makes of it; None where it refuses it.
        refusal: why it does.
    """

    answer: ProbeResponse
    document: dict[str, Any] | None = None
    info: FeedInfo | None = None
    refusal: str = ""

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The objects in its list of partitions."""
        listed = (self.document or {}).get("partitions")
        return [e for e in listed if isinstance(e, dict)] if isinstance(listed, list) else []

    @property
    def topology(self) -> Any:
        """What has to be the same in two discoveries, as long as no partition changes."""
        if self.info is None:
            return None
        lineage = {
            p.id: (p.closed, p.starts_after, p.cursor_from) for p in self.info.partitions.values()
        }
        return self.info.dialect, self.info.token, lineage


def read_discovery(answer: ProbeResponse, feed: str, v1_partitions: int | None) -> WireDiscovery:
    """Read a response to the argument-less GET."""
    found = WireDiscovery(answer)
    if answer.problem is not None or answer.status is None:
        return found
    if answer.status == 200:
        try:
            document = orjson.loads(answer.body)
            found.document = document if isinstance(document, dict) else None
        except ValueError:
            pass
    body = answer.body
    if found.document is not None and found.document.get("partitions", True) is None:
        body = orjson.dumps({**found.document, "partitions": []})  # as Go writes an empty list
    try:
        found.info = negotiate(answer.status, body, feed=feed, v1_partitions=v1_partitions)
    except FeedError as error:
        found.refusal = error.message
    return found


@dataclass(slots=True)
class Resume:
    """What came behind a checkpoint the second time, and what came the first time.

    Attributes:
        pages: from the checkpoint on, each from the last cursor of the one before.
        before: the events in front of the checkpoint.
        expected: those behind it.
        complete: whether both times everything up to the end was read.
        repeatable: whether the same request had the same answer; None where it was not repeated.
    """

    pages: list[WirePage]
    before: list[bytes]
    expected: list[bytes]
    complete: bool = False
    repeatable: bool | None = None

    def events(self) -> list[bytes]:
        """Return the events that came the second time."""
        *inner, last = self.pages
        closed = (page.events()[: page.checkpoints[-1].events_before] for page in inner)
        return [event for page in (*closed, last.events()) for event in page]


@dataclass(slots=True)
class Visit:
    """What was read of one partition.

    Attributes:
        partition: as discovery lists it.
        pages: from `_first` on, each from the last cursor of the one before.
        resumes: from checkpoints behind which events came, read again.
        last: from `_last`.
        polls: from the cursor of `last` on, each from the last cursor of the one before.
        at_last_cursor: from the `lastCursor` of a closed partition.
    """

    partition: Partition
    pages: list[WirePage] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    last: WirePage | None = None
    polls: list[WirePage] = field(default_factory=list)
    at_last_cursor: WirePage | None = None

    def all_pages(self) -> Iterator[WirePage]:
        """Yield every page that was asked for."""
        yield from self.pages
        resumed = (page for each in self.resumes for page in each.pages)
        for page in (*resumed, self.last, *self.polls, self.at_last_cursor):
            if page is not None:
                yield page

    def known(self) -> KnownEvents:
        """Return the events from `_first` on, as far as they were read."""
        known = KnownEvents()
        for page in self.pages:
            if page.asked != FIRST and page.asked not in known.places:
                break
            known.add(page)
        return known


@dataclass(slots=True)
class KnownEvents:
    """Events in their order, and how many of them come before each cursor."""

    events: list[bytes] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)

    def add(self, page: WirePage) -> None:
        """Add a page that begins where the one before ends, at its last cursor."""
        start = self.places.get(page.asked, 0)
        del self.events[start:]  # those without a checkpoint come again
        self.events += page.events()
        for checkpoint in page.checkpoints:
            self.places.setdefault(checkpoint.cursor, start + checkpoint.events_before)

    def before(self, page: WirePage) -> bool:
        """Whether a page without events leads back to where this partition was read before."""
        asked, now = self.places.get(page.asked), self.places.get(page.cursor or "")
        return not page.payloads and asked is not None and now is not None and now < asked


@dataclass(slots=True)
class FeedEvidence:
    """All that was asked and answered.

    Attributes:
        feed: the feed's URL without secrets.
        discoveries: in the order of time; the first one is what the rest is based upon.
        visits: by partition.
        probes: single requests by name: see `feedapi_client.cli.doctor.examination`.
        failures: answers after which a request was repeated.
        conflicts: fetches that were refused with 409 although the token was that of the discoveries
            before and behind them.
        current_token_refused: how many of them there were.
        wrong_count: how it shows that the caller gave a wrong number of partitions (dialect v1).
        timeout: seconds that one request may take.
    """

    feed: str
    discoveries: list[WireDiscovery] = field(default_factory=list)
    visits: dict[int, Visit] = field(default_factory=dict)
    probes: dict[str, ProbeResponse] = field(default_factory=dict)
    failures: list[ProbeResponse] = field(default_factory=list)
    current_token_refused: int = 0
    wrong_count: str = ""
    timeout: float = 0.0
    page_bytes: int = 0

    @property
    def first(self) -> WireDiscovery | None:
        """The first discovery."""
        return self.discoveries[0] if self.discoveries else None

    @property
    def info(self) -> FeedInfo | None:
        """What the first discovery says."""
        return self.discoveries[0].info if self.discoveries else None

    @property
    def dialect(self) -> DialectName | None:
        """The dialect; None when it is not known."""
        return None if self.info is None else self.info.dialect

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The partitions of the first discovery, as they were sent."""
        return self.discoveries[0].entries if self.discoveries else []

    @property
    def partitions(self) -> Mapping[int, Partition]:
        """The partitions of the first discovery."""
        return {} if self.info is None else self.info.partitions

    def was_closed(self, partition: int) -> bool:
        """Whether any discovery lists the partition as closed."""
        infos = (each.info for each in self.discoveries if each.info is not None)
        return any(
            listed.closed
            for info in infos
            if (listed := info.partitions.get(partition)) is not None
        )

    def pages(self) -> Iterator[tuple[int, WirePage]]:
        """Yield every page with its partition."""
        for id, visit in self.visits.items():
            for page in visit.all_pages():
                yield id, page

    def answers(self) -> Iterator[ProbeResponse]:
        """Yield every answer."""
        yield from (discovery.answer for discovery in self.discoveries)
        yield from (page.answer for _, page in self.pages())
        yield from self.probes.values()
