"""The requests of an examination: which are made, in which order.

The probes, by name:

- ``anonymous``: a discovery without credentials.
- ``identity``: a fetch that accepts no content coding.
- ``page-size``: a fetch with a page size of `HINT`.
- ``stream``: a fetch of a streamed response.
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

from feedapi_client.cli.doctor.answers import Answer, Question
from feedapi_client.cli.doctor.evidence import Discovery, Evidence, Visit, read_discovery
from feedapi_client.cli.doctor.prober import Prober
from feedapi_client.cli.doctor.wire_page import WirePage, read_page
from feedapi_client.model import FIRST, LAST, FeedInfo, Partition
from feedapi_client.options import FetchOptions, Limits
from feedapi_client.protocol.dialects import DIALECTS, Params

STRANGER = "feedapi-doctor"
"""The name of a filter, a token, an event type and a cursor that no feed knows."""
HINT = 2
_POLLS = 2
_FILTERS = 2
_MAX_PARTITION = 32767


class Examination:
    """Examines one feed. Call `run` once."""

    def __init__(
        self, prober: Prober, *, v1_partitions: int | None = None, only: Iterable[int] = ()
    ) -> None:
        self._prober = prober
        self._v1_partitions = v1_partitions
        self._only = frozenset(only)
        self.evidence = Evidence(
            prober.feed,
            failures=prober.failures,
            timeout=prober.bounds.timeout,
            page_bytes=prober.bounds.page_bytes,
        )

    async def run(self) -> Evidence:
        """Ask the feed, and return what it answered."""
        evidence = self.evidence
        first = await self._discover()
        if first.answer.problem is None and self._prober.has_credentials:
            question = self._discovery_question("a discovery without credentials", anonymous=True)
            evidence.probes["anonymous"] = await self._prober.ask(question)
        if first.info is None:
            return evidence
        await self._discover(identity=True)
        for partition in sample(first.info, self._prober.bounds.partitions, self._only):
            evidence.visits[partition.id] = Visit(partition)
            await self._visit(evidence.visits[partition.id])
        await self._discover()
        await self._probe(first.info)
        await self._discover()
        return evidence

    # Discoveries

    async def _discover(self, *, identity: bool = False) -> Discovery:
        question = self._discovery_question("a discovery", identity=identity)
        answer = await self._prober.ask(question)
        found = read_discovery(answer, self._prober.feed, self._v1_partitions)
        if answer.asked:
            self.evidence.discoveries.append(found)
        return found

    def _discovery_question(
        self, what: str, *, identity: bool = False, anonymous: bool = False
    ) -> Question:
        limit = min(Limits().max_discovery_bytes, self._prober.bounds.max_bytes)
        return Question(what=what, max_bytes=limit, identity=identity, anonymous=anonymous)

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
        if (middle := _middle(first)) is not None:
            visit.resumed = await self._page(visit.partition.id, middle)
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

    async def _page(self, partition: int, cursor: str) -> WirePage:
        answer = await self._fetch(partition, cursor)
        if answer.status == 409:
            before = self._info.token
            found = await self._discover()
            if found.info is not None and found.info.token == before:
                self.evidence.current_token_refused += 1
            answer = await self._fetch(partition, cursor)
        return read_page(answer, self._info.dialect)

    async def _fetch(self, partition: int, cursor: str) -> Answer:
        return await self._prober.ask(self._question(partition, cursor))

    def _question(
        self,
        partition: int,
        cursor: str,
        *,
        what: str = "",
        more: Params | None = None,
        **settings: bool | float,
    ) -> Question:
        info = self._info
        dialect = DIALECTS[info.dialect]
        params = [*dialect.fetch_params(info, partition, cursor, FetchOptions()), *(more or [])]
        place = cursor if cursor in (FIRST, LAST) else "a cursor"
        return Question(
            what=f"a fetch of partition {partition} from {place}{what}",
            suffix=dialect.suffix,
            params=params,
            partition=partition,
            cursor=cursor,
            max_bytes=self._prober.bounds.page_bytes,
            **settings,  # type: ignore[arg-type]
        )

    # Probes

    async def _probe(self, info: FeedInfo) -> None:
        readable = [id for id, visit in self.evidence.visits.items() if visit.pages[0].answer.ok]
        if not readable:
            return
        open_ = [id for id in readable if not info.partitions[id].closed]
        for name, question in self._probes(self._info, readable[0], open_[-1:]):
            self.evidence.probes[name] = await self._prober.ask(question)

    def _probes(
        self, info: FeedInfo, partition: int, streamed: list[int]
    ) -> Iterator[tuple[str, Question]]:
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

    def _refusals(self, info: FeedInfo, partition: int) -> Iterator[tuple[str, Question]]:
        """Yield requests that a publisher should refuse."""
        unlisted = next(
            (id for id in range(_MAX_PARTITION, -1, -1) if id not in info.partitions), None
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

    def _filters(self, info: FeedInfo, partition: int) -> Iterator[tuple[str, Question]]:
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

    def _streams(self, streamed: list[int]) -> Iterator[tuple[str, Question]]:
        milliseconds = self._prober.bounds.stream_milliseconds
        for partition in streamed:
            more = [("stream", str(milliseconds))]
            yield (
                "stream",
                self._question(
                    partition,
                    LAST,
                    what=f" with stream={milliseconds}",
                    more=more,
                    seconds=milliseconds / 1000 + self._prober.bounds.timeout / 2,
                ),
            )


def _with_param(question: Question, name: str, value: str) -> Question:
    question.params[:] = [(n, value if n == name else v) for n, v in question.params]
    return question


def _middle(page: WirePage) -> str | None:
    """Return a cursor within the page behind which further events and a checkpoint come."""
    if not page.checkpoints:
        return None
    closed = page.checkpoints[-1].events_before
    inner = [c.cursor for c in page.checkpoints if c.events_before < closed]
    return inner[len(inner) // 2] if inner else None


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
