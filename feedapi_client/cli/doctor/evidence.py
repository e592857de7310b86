"""What an examination has found: responses, without a judgement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from feedapi_client.cli.doctor.answers import Answer
from feedapi_client.cli.doctor.wire_page import WirePage
from feedapi_client.errors import FeedError
from feedapi_client.model import DialectName, FeedInfo, Partition
from feedapi_client.protocol.negotiation import negotiate


@dataclass(slots=True)
class Discovery:
    """One response to the argument-less GET, read with and without tolerance.

    Attributes:
        answer: the response.
        document: its JSON object; None when it is none.
        info: what a consumer of this library makes of it; None where it refuses it.
        refusal: why it does.
    """

    answer: Answer
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


def read_discovery(answer: Answer, feed: str, v1_partitions: int | None) -> Discovery:
    """Read a response to the argument-less GET."""
    found = Discovery(answer)
    if answer.problem is not None or answer.status is None:
        return found
    if answer.status == 200:
        try:
            document = orjson.loads(answer.body)
            found.document = document if isinstance(document, dict) else None
        except ValueError:
            pass
    try:
        found.info = negotiate(answer.status, answer.body, feed=feed, v1_partitions=v1_partitions)
    except FeedError as error:
        found.refusal = error.message
    return found


@dataclass(slots=True)
class Visit:
    """What was read of one partition.

    Attributes:
        partition: as discovery lists it.
        pages: from `_first` on, each from the last cursor of the one before.
        resumed: from a checkpoint within the first page, behind which events came.
        last: from `_last`.
        polls: from the cursor of `last` on, each from the last cursor of the one before.
        at_last_cursor: from the `lastCursor` of a closed partition.
    """

    partition: Partition
    pages: list[WirePage] = field(default_factory=list)
    resumed: WirePage | None = None
    last: WirePage | None = None
    polls: list[WirePage] = field(default_factory=list)
    at_last_cursor: WirePage | None = None

    def all_pages(self) -> Iterator[WirePage]:
        """Yield every page that was asked for."""
        yield from self.pages
        for page in (self.resumed, self.last, *self.polls, self.at_last_cursor):
            if page is not None:
                yield page


@dataclass(slots=True)
class Evidence:
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
        timeout: seconds that one request may take.
    """

    feed: str
    discoveries: list[Discovery] = field(default_factory=list)
    visits: dict[int, Visit] = field(default_factory=dict)
    probes: dict[str, Answer] = field(default_factory=dict)
    failures: list[Answer] = field(default_factory=list)
    current_token_refused: int = 0
    timeout: float = 0.0
    page_bytes: int = 0

    @property
    def first(self) -> Discovery | None:
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

    def pages(self) -> Iterator[tuple[int, WirePage]]:
        """Yield every page with its partition."""
        for id, visit in self.visits.items():
            for page in visit.all_pages():
                yield id, page

    def answers(self) -> Iterator[Answer]:
        """Yield every answer."""
        yield from (discovery.answer for discovery in self.discoveries)
        yield from (page.answer for _, page in self.pages())
        yield from self.probes.values()
