"""The requests of an examination: which are made, in which order.

The probes, by name:

- ``anonymous``: a discovery without credentials.
- ``identity``: a fetch that accepts no content coding.
- ``page-size``: a fetch with a page size of `HINT`.
- ``stream``: a fetch of a streamed response, from the end; ``stream-behind``: from a cursor behind
  which events are.
- ``unknown-filter``: with a filter that the feed does not list; ``filter NAME`` with one it lists.
- ``event-types``: with a selection of event types.
- ``stale-token``: with a token that was never given out.
- ``unknown-partition``: of a partition that is not listed.
- ``bad-cursor``: from a cursor that was never given out.
- ``wrong-count``: with another number of partitions (dialect v1).
- ``v1-headers``: with all event headers (dialect v1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from feedapi_client.cli.doctor.evidence import (
    FeedEvidence,
    KnownEvents,
    Resume,
    Visit,
    WireDiscovery,
    read_discovery,
)
from feedapi_client.cli.doctor.probe_messages import ProbeRequest
from feedapi_client.cli.doctor.prober import Prober
from feedapi_client.cli.doctor.wire_page import WirePage, read_page
from feedapi_client.client.feed_client import WRONG_COUNT
from feedapi_client.model import FIRST, LAST, MAX_PARTITION, FeedInfo, Partition
from feedapi_client.options import FetchOptions, Limits
from feedapi_client.protocol.dialects import DIALECTS, Params

STRANGER = "feedapi-doctor"
"""The name of a filter, a token, an event type and a cursor that no feed knows."""
HINT = 2
_POLLS = 2
_FILTERS = 2
_TOPOLOGIES = 3
"""Times that a new topology is looked for behind a refusal."""
_COUNTS = 16
"""Numbers of partitions that are tried of a feed of dialect v1."""


class Examination:
    """Examines one feed. Call `run` once."""

    def __init__(
        self, prober: Prober, *, v1_partitions: int | None = None, only: Iterable[int] = ()
    ) -> None:
        self._prober = prober
        self._v1_partitions = v1_partitions
        self._only = frozenset(only)
        self.evidence = FeedEvidence(
            prober.feed,
            failures=prober.failures,
            timeout=prober.bounds.timeout,
            page_bytes=prober.bounds.page_bytes,
        )

    async def run(self) -> FeedEvidence:
        """Ask the feed, and return what it answered."""
        evidence = self.evidence
        first = await self._discover()
        if first.answer.problem is None and self._prober.has_credentials:
            question = self._discovery_question("a discovery without credentials", anonymous=True)
            evidence.probes["anonymous"] = await self._prober.ask(question)
        if first.info is None:
            return evidence
        await self._discover(identity=True)
        await self._visit_all(first.info)
        await self._discover()
        if self._info.dialect == "v1":
            evidence.wrong_count = await self._wrong_count(len(first.info.partitions))
        await self._probe()
        await self._discover()
        return evidence

    async def _visit_all(self, first: FeedInfo) -> None:
        """Read partitions of the first discovery, and others in place of those that are replaced
        meanwhile."""
        visits, size = self.evidence.visits, self._prober.bounds.partitions
        gone: set[int] = set()
        for _ in range(_TOPOLOGIES):
            info = self._info if gone else first
            found = [each for each in sample(info, size, self._only) if each.id not in visits]
            for partition in found[: size - len(visits)]:
                visit = visits[partition.id] = Visit(partition)
                try:
                    await self._visit(visit)
                except _ReplacedError:
                    gone.add(partition.id)
                    if not visit.pages:
                        del visits[partition.id]
            if not gone:
                return

    # Discoveries

    async def _discover(self, *, identity: bool = False) -> WireDiscovery:
        question = self._discovery_question("a discovery", identity=identity)
        answer = await self._prober.ask(question)
        found = read_discovery(answer, self._prober.feed, self._v1_partitions)
        if answer.asked:
            self.evidence.discoveries.append(found)
        return found

    def _discovery_question(
        self, what: str, *, identity: bool = False, anonymous: bool = False
    ) -> ProbeRequest:
        limit = min(Limits().max_discovery_bytes, self._prober.bounds.max_bytes)
        return ProbeRequest(what=what, max_bytes=limit, identity=identity, anonymous=anonymous)

    @property
    def _info(self) -> FeedInfo:
        """The newest discovery that can be used."""
        return next(d.info for d in reversed(self.evidence.discoveries) if d.info is not None)

    # Partitions

    async def _visit(self, visit: Visit) -> None:
        first = await self._page(visit.partition.id, FIRST)
        visit.pages.append(first)
        if not first.answer.ok:
            return
        await self._follow(visit)
        await self._resume(visit)
        visit.last = await self._page(visit.partition.id, LAST)
        cursor = visit.last.moved_to
        while cursor is not None and len(visit.polls) < _POLLS:
            visit.polls.append(await self._page(visit.partition.id, cursor))
            cursor = visit.polls[-1].moved_to
        if visit.partition.closed and visit.partition.last_cursor is not None:
            visit.at_last_cursor = await self._page(visit.partition.id, visit.partition.last_cursor)

    async def _follow(self, visit: Visit) -> None:
        """Read further pages, as long as each one says where the next one begins."""
        seen = {FIRST}
        cursor = visit.pages[0].moved_to
        while cursor is not None and cursor not in seen:
            if len(visit.pages) >= self._prober.bounds.pages:
                return
            seen.add(cursor)
            visit.pages.append(await self._page(visit.partition.id, cursor))
            cursor = visit.pages[-1].moved_to

    async def _resume(self, visit: Visit) -> None:
        """Read again from checkpoints behind which events came."""
        known = visit.known()
        inner = [cursor for cursor, place in known.places.items() if place < len(known.events)]
        if not inner and len(known.events) > HINT:
            more = [(DIALECTS[self._info.dialect].page_size, str(HINT))]
            small = await self._page(visit.partition.id, FIRST, more=more)
            if 0 < len(small.payloads) < len(known.events) and small.moved_to is not None:
                known.places[small.moved_to] = small.checkpoints[-1].events_before
                inner = [small.moved_to]
        for cursor in dict.fromkeys(inner[i] for i in (0, len(inner) // 2, -1) if inner):
            visit.resumes.append(await self._resume_at(visit, known, cursor))

    async def _resume_at(self, visit: Visit, known: KnownEvents, cursor: str) -> Resume:
        id, place = visit.partition.id, known.places[cursor]
        pages = [await self._page(id, cursor)]
        resume = Resume(pages, known.events[:place], known.events[place:])
        length = min(len(resume.expected), len(resume.events()))
        if length and resume.events()[:length] == resume.expected[:length]:
            return resume
        again = (await self._page(id, cursor)).events()
        shared = min(len(again), len(resume.events()))
        resume.repeatable = again[:shared] == resume.events()[:shared]
        while pages[-1].moved_to is not None and len(pages) <= 2 * self._prober.bounds.pages:
            pages.append(await self._page(id, pages[-1].moved_to))
        resume.complete = pages[-1].at_end and visit.pages[-1].at_end
        return resume

    async def _page(self, partition: int, cursor: str, *, more: Params | None = None) -> WirePage:
        """Fetch a page; again with a new topology where that explains a refusal (R10).

        Raises `_ReplacedError` where the partition is not listed any more.
        """
        attempt = 0
        answer = await self._prober.ask(self._question(partition, cursor, more=more))
        while answer.refused and attempt < _TOPOLOGIES - 1:
            before = self._info
            found = await self._discover()
            if found.info is None:
                break
            if partition not in found.info.partitions:
                raise _ReplacedError
            if found.info.token == before.token:
                self.evidence.current_token_refused += answer.status == 409
                if attempt:
                    break
            attempt += 1
            answer = await self._prober.ask(self._question(partition, cursor, more=more))
        return read_page(answer, self._info.dialect)

    def _question(
        self,
        partition: int,
        cursor: str,
        *,
        what: str = "",
        more: Params | None = None,
        **settings: bool | float,
    ) -> ProbeRequest:
        info = self._info
        dialect = DIALECTS[info.dialect]
        params = [*dialect.fetch_params(info, partition, cursor, FetchOptions()), *(more or [])]
        place = cursor if cursor in (FIRST, LAST) else "a cursor"
        return ProbeRequest(
            what=f"a fetch of partition {partition} from {place}{what}",
            suffix=dialect.suffix,
            params=params,
            partition=partition,
            cursor=cursor,
            max_bytes=self._prober.bounds.page_bytes,
            **settings,  # type: ignore[arg-type]
        )

    # Probes

    async def _probe(self) -> None:
        for name in list(self._build_probes()):
            for _ in range(_TOPOLOGIES):
                question = self._build_probes().get(name)
                if question is None:
                    break  # its partition was replaced
                before = self._info
                self.evidence.probes[name] = answer = await self._prober.ask(question)
                if not answer.refused or _same_topology(before, (await self._discover()).info):
                    break

    def _build_probes(self) -> dict[str, ProbeRequest]:
        """Return the probes for the newest topology."""
        info, visits = self._info, self.evidence.visits
        readable = [
            id for id, visit in visits.items() if visit.pages[0].answer.ok and id in info.partitions
        ]
        if not readable:
            return {}
        # The one with the most events shows whether a page size counts.
        readable.sort(key=lambda one: -len(visits[one].pages[0].payloads))
        open_ = [id for id in readable if not info.partitions[id].closed]
        return dict(self._probes(info, readable[0], open_[:1]))

    async def _wrong_count(self, given: int) -> str:
        """Return how it shows that the caller gave a wrong number of partitions; "" if it does not.

        A feed of dialect v1 does not list its partitions.
        """
        visits = self.evidence.visits
        refused = [id for id, visit in visits.items() if visit.pages[0].answer.refused]
        if not refused:
            return ""
        if len(refused) < len(visits):
            return (
                f"it does not know partition {min(refused)}: {visits[min(refused)].pages[0].answer}"
            )
        first = visits[refused[0]].pages[0].answer
        for count in (count for count in range(1, _COUNTS + 1) if count != given):
            question = _with_param(self._question(0, FIRST), "n", str(count))
            if (await self._prober.ask(question)).ok:
                return f"{first}; it answers requests with n={count}"
        return str(first) if WRONG_COUNT.search(first.detail) else ""

    def _probes(
        self, info: FeedInfo, partition: int, streamed: list[int]
    ) -> Iterator[tuple[str, ProbeRequest]]:
        dialect = DIALECTS[info.dialect]
        yield "identity", self._question(partition, FIRST, identity=True)
        hint = [(dialect.page_size, str(HINT))]
        yield "page-size", self._question(partition, FIRST, what=" with a page size", more=hint)
        yield from self._refusals(info, partition)
        if dialect.filters:
            yield from self._filters(info, partition)
        if dialect.event_types:
            types = [("event-types", STRANGER)]
            yield (
                "event-types",
                self._question(partition, FIRST, what=" with event-types", more=types),
            )
        if info.dialect == "v1":
            headers = [("headers", "_all")]
            yield "v1-headers", self._question(partition, FIRST, what=" with headers", more=headers)
        if info.stream:
            yield from self._streams(streamed)

    def _refusals(self, info: FeedInfo, partition: int) -> Iterator[tuple[str, ProbeRequest]]:
        """Yield requests that a publisher should refuse."""
        unlisted = next(
            (id for id in range(MAX_PARTITION, -1, -1) if id not in info.partitions), None
        )
        if unlisted is not None:
            yield "unknown-partition", self._question(unlisted, FIRST)
        yield "bad-cursor", self._question(partition, f"{STRANGER} is no cursor")
        if info.token is not None:
            question = self._question(partition, FIRST, what=" with a token of nobody")
            yield "stale-token", _with_param(question, "token", STRANGER)
        if info.dialect == "v1":
            wrong = str(len(info.partitions) + 1)
            question = self._question(partition, FIRST, what=f" with n={wrong}")
            yield "wrong-count", _with_param(question, "n", wrong)

    def _filters(self, info: FeedInfo, partition: int) -> Iterator[tuple[str, ProbeRequest]]:
        unknown = [(f"filter-{STRANGER}", "1")]
        yield (
            "unknown-filter",
            self._question(partition, FIRST, what=" with an unknown filter", more=unknown),
        )
        for name in info.filters[:_FILTERS]:
            listed = [(f"filter-{name}", STRANGER)]
            yield (
                f"filter {name}",
                self._question(partition, FIRST, what=f" with filter-{name}", more=listed),
            )

    def _streams(self, streamed: list[int]) -> Iterator[tuple[str, ProbeRequest]]:
        for partition in streamed:
            yield "stream", self._stream(partition, LAST)
            known = self.evidence.visits[partition].known()
            behind = [each for each, place in known.places.items() if place < len(known.events)]
            if behind:  # few events come at once, so that what holds them back shows
                yield "stream-behind", self._stream(partition, behind[-1])

    def _stream(self, partition: int, cursor: str) -> ProbeRequest:
        bounds = self._prober.bounds
        return self._question(
            partition,
            cursor,
            what=f" with stream={bounds.stream_milliseconds}",
            more=[("stream", str(bounds.stream_milliseconds))],
            seconds=bounds.stream_milliseconds / 1000 + bounds.timeout / 2,
        )


class _ReplacedError(Exception):
    """The partition is not listed any more: others have replaced it."""


def _same_topology(before: FeedInfo, now: FeedInfo | None) -> bool:
    return now is None or (before.token, before.partitions) == (now.token, now.partitions)


def _with_param(question: ProbeRequest, name: str, value: str) -> ProbeRequest:
    question.params[:] = [(n, value if n == name else v) for n, v in question.params]
    return question


def sample(info: FeedInfo, size: int, only: frozenset[int] = frozenset()) -> list[Partition]:
    """Return partitions of each kind: closed, of either split method, and open roots.

    Arguments:
        info: the discovery.
        size: the largest number of partitions.
        only: the partitions to take, where they are listed; empty: any.
    """
    if only:
        return [p for id, p in sorted(info.partitions.items()) if id in only][:size]
    kinds: dict[tuple[bool, bool, bool], list[Partition]] = {}
    for partition in info.partitions.values():
        kind = (
            partition.closed,
            partition.starts_after is not None,
            bool(partition.cursor_from),
        )
        kinds.setdefault(kind, []).append(partition)
    # The ends of each kind first: ids at the limits are where publishers go wrong.
    queues = [[group[0], *reversed(group[1:])] for group in kinds.values()]
    chosen: list[Partition] = []
    while queues and len(chosen) < size:
        for queue in list(queues):
            if len(chosen) < size:
                chosen.append(queue.pop(0))
            if not queue:
                queues.remove(queue)
    return sorted(chosen, key=lambda partition: partition.id)
