"""An examination of a feed: what is asked, in which order, and what came."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

from feedapi_client.cli.doctor.prober import Answer, Prober, Problem
from feedapi_client.cli.doctor.wire import Discovery, Page
from feedapi_client.model import FIRST, LAST, MAX_PARTITION, FeedInfo, Partition
from feedapi_client.options import FetchOptions
from feedapi_client.protocol.dialects import DIALECTS

HINT = 2
"""The page size that is asked for."""
_STRANGER = "feedapi-doctor"
"""The name of a filter, a token, an event type and a cursor that no feed knows."""
_POLLS = 2
_FILTERS = 2
_TOPOLOGIES = 3
"""Times that a new topology is looked for behind a refusal."""
_COUNTS = 16
"""Numbers of partitions that are tried of a feed of dialect v1."""
_WRONG_COUNT = re.compile(r"partition count (mismatch|does ?n.t match)", re.IGNORECASE)


@dataclass(slots=True)
class Resume:
    """Pages from a checkpoint on, read again, beside the events in front of it and behind it."""

    before: list[bytes]
    expected: list[bytes]
    pages: list[Page] = field(default_factory=list)
    complete: bool = False  # everything up to the end was read
    repeatable: bool | None = None  # the same request had the same answer; None: not repeated

    @property
    def events(self) -> list[bytes]:
        *inner, last = self.pages
        return [*(event for page in inner for event in page.closed_events), *last.events]


@dataclass(slots=True)
class Visit:
    """What was read of one partition. Each page begins at the last cursor of the one before."""

    partition: Partition
    pages: list[Page] = field(default_factory=list)  # from `_first` on
    resumes: list[Resume] = field(default_factory=list)
    last: Page | None = None  # from `_last`
    polls: list[Page] = field(default_factory=list)  # behind it
    at_last_cursor: Page | None = None  # of a closed partition

    def all_pages(self) -> Iterator[Page]:
        resumed = [page for each in self.resumes for page in each.pages]
        pages = (*self.pages, *resumed, self.last, *self.polls, self.at_last_cursor)
        return (page for page in pages if page is not None)

    def known(self) -> tuple[list[bytes], dict[str, int]]:
        """Return the events from `_first` on, and how many of them come before each cursor."""
        events: list[bytes] = []
        places = {FIRST: 0}
        for page in self.pages:
            if page.asked not in places:
                break
            start = places[page.asked]
            events[start:] = page.events  # those without a checkpoint come again
            for cursor, before in page.checkpoints:
                places.setdefault(cursor, start + before)
        del places[FIRST]
        return events, places

    def resumable(self, *, within: bool = False) -> dict[str, Resume]:
        """Return the cursors behind which events came, or `within` a page, with these events."""
        (events, places), found, before = self.known(), dict[str, Resume](), list[bytes]()
        for page in self.pages:
            # Events behind the last cursor of a page come again with the next one, or are lost.
            closed = page.closed_events == page.events
            for cursor, place in page.checkpoints:
                after = places.get(cursor, len(events))
                behind = events[after:] if closed else page.events[place:]
                if page.events[place:] if within else behind:
                    found.setdefault(cursor, Resume([*before, *page.events[:place]], behind))
            before += page.closed_events
        return found


class Examination:
    """Asks one feed: call `run` once. What came is kept, for checks to judge it.

    Attributes:
        discoveries: in the order of time; the first one is what the rest is based upon.
        visits: by partition.
        probes: single requests, by name.
        current_token_refused: the number of fetches that were refused with 409 although the token
            was that of the discoveries before and behind them.
        wrong_count: how it shows that `v1_partitions` is wrong; "" if it does not.
    """

    def __init__(self, prober: Prober, v1_partitions: int | None) -> None:
        self.prober, self._v1_partitions = prober, v1_partitions
        self.discoveries: list[Discovery] = []
        self.visits: dict[int, Visit] = {}
        self.probes: dict[str, Page] = {}
        self.current_token_refused = 0
        self.wrong_count = ""

    @property
    def info(self) -> FeedInfo | None:
        return self.discoveries[0].info if self.discoveries else None

    @property
    def infos(self) -> list[FeedInfo]:
        return [each.info for each in self.discoveries if each.info is not None]

    @property
    def partitions(self) -> Mapping[int, Partition]:
        return {} if self.info is None else self.info.partitions

    def pages(self) -> list[Page]:
        return [page for visit in self.visits.values() for page in visit.all_pages()]

    def answers(self) -> list[Answer]:
        return [*self.discoveries, *self.pages(), *self.probes.values()]

    async def run(self) -> None:
        first = await self._discover()
        if first.problem is None and self.prober.knows_credentials:
            question = Page("a discovery without credentials", anonymous=True)
            self.probes["anonymous"] = await self.prober.ask(question)
        if first.info is None:
            return
        await self._discover(identity=True)
        await self._visit_all(first.info)
        await self._discover()
        if first.info.dialect == "v1":
            self.wrong_count = await self._count_problem(len(first.info.partitions))
        for name in dict(self._probes()):
            await self._probe(name)
        await self._discover()

    async def _discover(self, *, identity: bool = False) -> Discovery:
        answer = await self.prober.ask(Discovery("a discovery", identity=identity))
        if answer.problem is not Problem.NOT_ASKED:
            self.discoveries.append(answer)
        return answer.read(self.prober.feed, self._v1_partitions)

    async def _visit_all(self, info: FeedInfo) -> None:
        size, replaced = self.prober.bounds.partitions, False
        for _ in range(_TOPOLOGIES):
            found = [p for p in sample(info, size) if p.id not in self.visits]
            for partition in found[: size - len(self.visits)]:
                visit = self.visits[partition.id] = Visit(partition)
                try:
                    await self._visit(visit, partition.id)
                except _ReplacedError:
                    replaced = True
                    if not visit.pages:
                        del self.visits[partition.id]
            if not replaced:
                return
            info = self.infos[-1]

    async def _visit(self, visit: Visit, id: int) -> None:
        pages, polls = visit.pages, visit.polls
        pages.append(await self._fetch(id, FIRST))
        if not pages[0].ok:
            return
        while len(pages) < self.prober.bounds.pages and (cursor := pages[-1].moved_to):
            if cursor in [page.asked for page in pages]:
                break
            pages.append(await self._fetch(id, cursor))
        await self._resume(visit, id)
        visit.last = await self._fetch(id, LAST)
        while len(polls) < _POLLS and (cursor := (polls or [visit.last])[-1].moved_to):
            polls.append(await self._fetch(id, cursor))
        if visit.partition.closed and visit.partition.last_cursor is not None:
            visit.at_last_cursor = await self._fetch(id, visit.partition.last_cursor)

    async def _resume(self, visit: Visit, id: int) -> None:
        """Read again from checkpoints behind which events came.

        Where each page ends at its only checkpoint, pages begin the same each time. One from inside
        a page shows what they leave out or repeat.
        """
        events, found = visit.known()[0], visit.resumable(within=True)
        at_ends = {} if found else visit.resumable()
        if not found and len(events) > HINT:
            page_size = DIALECTS[self.infos[-1].dialect].page_size
            small = await self._fetch(id, FIRST, {page_size: str(HINT)})
            if 0 < len(small.payloads) < len(events) and small.moved_to is not None:
                behind = _without(events, small.closed_events)
                found[small.moved_to] = Resume(small.closed_events, behind)
        inner = [*(found | at_ends).items()]
        for cursor, resume in dict(inner[i] for i in (0, len(inner) // 2, -1) if inner).items():
            await self._read_again(resume, id, cursor)
            resume.complete = resume.repeatable is not None and resume.pages[-1].at_end
            visit.resumes.append(resume)

    async def _read_again(self, resume: Resume, id: int, cursor: str) -> None:
        """Read one page; as many as there are, if it differs."""
        resume.pages.append(await self._fetch(id, cursor))
        events = resume.events
        if events and _agree(events, resume.expected):
            return
        resume.repeatable = _agree((await self._fetch(id, cursor)).events, events)
        while len(resume.pages) <= 2 * self.prober.bounds.pages:
            onward = resume.pages[-1].moved_to
            if onward is None:
                return
            resume.pages.append(await self._fetch(id, onward))

    async def _fetch(self, id: int, cursor: str, more: Mapping[str, str] | None = None) -> Page:
        """Fetch a page; again with a new topology where that explains a refusal (R10).

        Raises `_ReplacedError` where the partition is not listed any more.
        """
        page = await self._ask(self._question(id, cursor, more=more))
        for attempt in range(1, _TOPOLOGIES):
            if not page.refused:
                break
            before, found = self.infos[-1], (await self._discover()).info
            if found is None:
                break
            if id not in found.partitions:
                raise _ReplacedError
            if found.token == before.token:
                self.current_token_refused += page.status == 409
                if attempt > 1:
                    break
            page = await self._ask(self._question(id, cursor, more=more))
        return page

    async def _ask(self, question: Page) -> Page:
        return (await self.prober.ask(question)).read(DIALECTS[self.infos[-1].dialect])

    def _question(
        self,
        id: int,
        cursor: str,
        what: str = "",
        more: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Page:
        """Return a fetch. `more` are parameters, also in place of its own ones."""
        info, dialect = self.infos[-1], DIALECTS[self.infos[-1].dialect]
        params = dict(dialect.fetch_params(info, id, cursor, FetchOptions())) | dict(more or {})
        what = f"a fetch from {cursor if cursor in (FIRST, LAST) else 'a cursor'}{what}"
        return Page(what, id, cursor, dialect.suffix, params, **settings)

    async def _count_problem(self, given: int) -> str:
        firsts = {id: visit.pages[0] for id, visit in self.visits.items()}
        refused = {id: answer for id, answer in firsts.items() if answer.refused}
        if not refused:
            return ""
        if len(refused) < len(firsts):
            return f"it does not know partition {min(refused)}: {refused[min(refused)]}"
        first = next(iter(refused.values()))
        for count in (str(count) for count in range(1, _COUNTS + 1) if count != given):
            if (await self._ask(self._question(0, FIRST, more={"n": count}))).ok:
                return f"{first}; it answers requests with n={count}"
        return str(first) if _WRONG_COUNT.search(first.detail) else ""

    async def _probe(self, name: str) -> None:
        for _ in range(_TOPOLOGIES):
            question = dict(self._probes()).get(name)
            if question is None:
                return  # its partition was replaced
            before = self.infos[-1]
            self.probes[name] = page = await self._ask(question)
            if not page.refused and not question.lasts:
                return  # a stream ends early where its partition is replaced, too
            now = (await self._discover()).info or before
            if (now.token, now.partitions) == (before.token, before.partitions):
                return

    def _probes(self) -> Iterator[tuple[str, Page]]:
        info, counts = self.infos[-1], {}
        for id, visit in self.visits.items():
            if id in info.partitions and visit.pages[0].ok:
                counts[id] = len(visit.pages[0].payloads)
        if not counts:
            return
        dialect = DIALECTS[info.dialect]
        most = max(counts, key=counts.__getitem__)  # shows whether a page size counts
        first = partial(self._question, most, FIRST)
        yield "identity", first(identity=True)
        yield "page-size", first(" with a page size", {dialect.page_size: str(HINT)})
        for id in [id for id in range(MAX_PARTITION, -1, -1) if id not in info.partitions][:1]:
            yield "unknown-partition", self._question(id, FIRST, ", of no listed partition")
        yield "bad-cursor", self._question(most, f"{_STRANGER} is no cursor", " of nobody")
        if info.token is not None:
            yield "stale-token", first(" with a token of nobody", {"token": _STRANGER})
        if info.dialect == "v1":
            wrong = str(len(info.partitions) + 1)
            yield "wrong-count", first(f" with n={wrong}", {"n": wrong})
            yield "v1-headers", first(" with headers", {"headers": "_all"})
        if dialect.filters:
            yield "unknown-filter", first(" with an unknown filter", {f"filter-{_STRANGER}": "1"})
            for name in [f"filter-{name}" for name in info.filters[:_FILTERS]]:
                yield name, first(f" with {name}", {name: _STRANGER})
        if dialect.event_types:
            yield "event-types", first(" with event-types", {"event-types": _STRANGER})
        for id in [id for id in counts if info.stream and not info.partitions[id].closed][:1]:
            yield "stream", self._stream(id, LAST)
            for cursor in [*self.visits[id].resumable()][-1:]:
                # Few events come at once, so that what holds them back shows.
                yield "stream-behind", self._stream(id, cursor)

    def _stream(self, id: int, cursor: str) -> Page:
        asked = self.prober.bounds.stream_milliseconds
        seconds, more = asked / 1000 + self.prober.bounds.timeout / 2, {"stream": str(asked)}
        return self._question(id, cursor, f" with stream={asked}", more, lasts=seconds)


class _ReplacedError(Exception):
    """The partition is not listed any more: others have replaced it."""


def _agree(one: list[bytes], other: list[bytes]) -> bool:
    return all(mine == its for mine, its in zip(one, other, strict=False))


def _without(events: list[bytes], some: list[bytes]) -> list[bytes]:
    left, rest = Counter(some), list[bytes]()
    for event in events:
        if left[event]:
            left[event] -= 1
        else:
            rest.append(event)
    return rest


def sample(info: FeedInfo, size: int) -> list[Partition]:
    kinds: dict[object, list[Partition]] = defaultdict(list)
    for p in info.partitions.values():
        kinds[p.closed, p.starts_after is not None, bool(p.cursor_from)].append(p)
    # The ends of each kind first: ids at the limits are where publishers go wrong.
    rounds = zip_longest(*([kind[0], *reversed(kind[1:])] for kind in kinds.values()))
    chosen = [p for each in rounds for p in each if p is not None][:size]
    return sorted(chosen, key=lambda partition: partition.id)
