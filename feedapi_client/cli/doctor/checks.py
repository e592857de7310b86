"""What a check is, and all checks of ``feedapi doctor``, each with its texts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

from feedapi_client.cli.doctor.examination import HINT, Examination, Resume, Visit
from feedapi_client.cli.doctor.prober import Answer, Problem
from feedapi_client.cli.doctor.wire import Discovery, Page
from feedapi_client.errors import LineageError
from feedapi_client.lineage.graph import Graph, suspected_missing_edges
from feedapi_client.model import FIRST
from feedapi_client.protocol.text import counted

LEVELS = MUST, SHOULD, DEVIATION = "MUST", "SHOULD", "deviation"
"""How binding a requirement is, the most binding first."""
TAKEN_IN = {
    "discovery-usable": "partition-id partition-unique discovery-types last-cursor-text "
    "one-split-method lineage-types no-cycle",
    "id-text": "partition-id-string lineage-string",
    "lineage-edge": "lineage-zero",
    "http-stable": "http-rate",
    "fetch-accepted": "fetch-first fetch-last cursor-accepted",
    "line-sound": "line-json payload-type line-partition cursor-text cursor-special",
    "payload-key": "key-case",
    "cursor-progress": "cursor-onwards",
    "page-meaning": "page-discovery",
    "closed-end": "closed-end-reached",
    "argument-accepted": "page-size filter-listed event-types stream-accepted v1-headers",
    "stream-sound": "stream-cursor stream-ends",
    "stream-live": "stream-held stream-buffered",
    "refusal-status": "partition-unknown cursor-refused v1-count",
}
"""Ids of former checks, by the check that has taken them in."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is not as a check requires, in one sentence; `level` where it is not the check's.

    `said` goes on with words of the publisher, which may hold a secret.
    """

    text: str
    partition: int | None = None
    level: str = ""
    said: str = ""


def about(answer: Answer, text: str = "", said: str = "") -> Finding:
    return Finding(f"{answer.what}: {text or answer}", answer.partition, said=said)


Findings = Iterator[Finding]
Find = Callable[[Examination], Findings]
Need = Callable[[Examination], str]
"""Returns why a check can't be done, "" where it can."""


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement to a publisher, and what a consumer pays where it is not met.

    `rules` of consumption deal with it. Without one of `needs` it is not done. `was` are ids of
    checks that it has taken in.
    """

    id: str
    requirement: str
    cost: str
    level: str
    source: str
    rules: list[str]
    needs: tuple[Need, ...]
    was: list[str]
    find: Find


class Section(list[Check]):
    """The checks of one subject, which stand under its heading in the documentation."""

    def __init__(self, heading: str) -> None:
        super().__init__()
        self.heading = heading

    def check(
        self, level: str, source: str, rules: str = "", *needs: Need
    ) -> Callable[[Find], Find]:
        """Return a decorator that adds a check: a function that finds what is wrong.

        Its docstring is the requirement up to the first line that ends with a full stop, then the
        cost.
        """

        def add(find: Find) -> Find:
            text = "\n".join(line.strip() for line in (find.__doc__ or "").splitlines())
            required, _, cost = text.partition(".\n")
            texts = f"{required}.".replace("\n", " "), cost.replace("\n", " ")
            id = find.__name__.replace("_", "-")
            was = TAKEN_IN.get(id, "").split()
            self.append(Check(id, *texts, level, source, rules.split(), needs, was, find))
            return find

        return add


DISCOVERY, LINEAGE, RESPONSES = map(Section, ("Discovery", "Lineage", "Responses"))
PAGES, AGAIN = Section("Pages and cursors"), Section("Cursors asked for again")
ARGUMENTS = Section("Arguments")
SECTIONS = (DISCOVERY, LINEAGE, RESPONSES, PAGES, AGAIN, ARGUMENTS)

FIELD = "publishers in the field"
CLOSING = "specification, Partitions, starting and closing partitions"
PARTITIONS = "specification, Discovery call, partitions"
_NEGOTIATION = "specification, Protocol negotiation"
_METHOD_1 = "specification, Partitions, method 1"
_METHOD_2 = "specification, Partitions, method 2"


def need(reason: str, met: Callable[[Examination], object]) -> Need:
    return lambda e: "" if met(e) else reason


def dialects(*names: str) -> Need:
    only = f"only in dialect {' and '.join(names)}"

    def missing(e: Examination) -> str:
        if e.info is None:
            return "the discovery can't be used"
        return "" if e.info.dialect in names else only

    return missing


DRAFT, TOKEN = dialects("v2-draft"), dialects("v2-token")
V2 = dialects("v2-draft", "v2-token")
DOCUMENT = need(
    "no discovery document", lambda e: e.discoveries and e.discoveries[0].document is not None
)
CLOSED = need("no partition is closed", lambda e: any(p.closed for p in e.partitions.values()))
DISCOVERIES = need("only one discovery", lambda e: len(e.discoveries) > 1)


def _problem(found: Discovery) -> str:
    """Return what makes a response none to the argument-less GET; "" where nothing does."""
    if found.problem is None and found.status == 400 and found.info is not None:
        return ""
    if found.problem is not None or found.status != 200:
        return str(found)
    if found.cut:
        return f"longer than {len(found.body)} bytes, which is as much as was read"
    listed = (found.document or {"partitions": 0}).get("partitions", 0)
    fine = listed is None or isinstance(listed, list)
    return "" if fine else "status 200 with a body that is no JSON object with a list of partitions"


@DISCOVERY.check(MUST, _NEGOTIATION, "R1 R10")
def discovery_answers(e: Examination) -> Findings:
    """A GET without arguments is answered with status 200 and a JSON object that lists
    `partitions`; by a v1 feed with status 400.
    A consumer does not start. One that runs goes on with the topology it knows, and does not see
    splits."""
    if problems := [problem for each in e.discoveries if (problem := _problem(each))]:
        yield Finding(f"{len(problems)} of {len(e.discoveries)} discoveries: {problems[0]}")


@DISCOVERY.check(MUST, PARTITIONS, "R1 R12 R18", DOCUMENT)
def discovery_usable(e: Examination) -> Findings:
    """Each partition is listed once, with an `id` from 0 to 32767 and one split method, and none
    descends from itself. Fields have their types. Cursors are printable ASCII of at most 16 KiB.
    A consumer refuses the whole discovery, and does not start."""
    refusal = e.discoveries[0].refusal
    try:
        Graph(e.info.partitions if e.info else {})
    except LineageError as error:
        refusal = error
    if refusal is not None:
        yield Finding("", refusal.partition, said=refusal.message)


_LINEAGE = {
    "startsAfterParent": "startsAfterPartition",
    "splitFromAncestors": "cursorFromPartitions",
}


@DISCOVERY.check(MUST, PARTITIONS, "R12", DOCUMENT)
def id_text(e: Examination) -> Findings:
    """An `id` is a string, without leading zeros, as are those in `startsAfterPartition` and
    `cursorFromPartitions` (numbers there are a deviation).
    This library accepts numbers. Clients with typed decoders fail at the discovery."""
    entries = e.discoveries[0].entries
    ids = [entry.get("id") for entry in entries]
    if numbers := [id for id in ids if type(id) is int]:
        yield Finding(f"{counted(len(numbers), 'number')} as id, such as ", said=str(numbers[0]))
    texts = [id for id in ids if isinstance(id, str) and id.isdigit()]
    if padded := [id for id in texts if id != "0" and id.startswith("0")]:
        yield Finding(
            f"{counted(len(padded), 'id')} with leading zeros, such as ", said=padded[0][:20]
        )
    fields = [[entry.get(name) for name in (*_LINEAGE, *_LINEAGE.values())] for entry in entries]
    values = [[*own, *chain(*(v for v in own if isinstance(v, list)))] for own in fields]
    if count := sum(int in map(type, each) for each in values):
        yield Finding(
            f"the lineage of {counted(count, 'partition')} holds numbers", level=DEVIATION
        )


@DISCOVERY.check(MUST, PARTITIONS, "R6", DRAFT, CLOSED)
def last_cursor_listed(e: Examination) -> Findings:
    """In a draft feed, a closed partition has `lastCursor`.
    A consumer can't tell the end from a replica that lags: it asks again for `Limits.settle_time`,
    before the children begin."""
    for id, partition in e.partitions.items():
        if partition.closed and partition.last_cursor is None:
            yield Finding("it is closed and has no lastCursor", id)


@DISCOVERY.check(DEVIATION, FIELD, "R6", TOKEN, CLOSED)
def last_cursor_useful(e: Examination) -> Findings:
    """A closed partition has `lastCursor`, in a published feed too.
    A consumer can't tell the end from a replica that lags: it asks again for `Limits.settle_time`,
    before the children begin."""
    return last_cursor_listed(e)


@DISCOVERY.check(DEVIATION, FIELD, "R7", DOCUMENT, V2)
def partitions_listed(e: Examination) -> Findings:
    """Discovery lists a partition.
    A consumer waits for one, and is not ready until then."""
    empty = [d for d in e.discoveries if d.info is not None and not d.info.partitions]
    if empty:
        listed = "null" if (empty[0].document or {}).get("partitions") is None else "an empty list"
        yield Finding(f"{len(empty)} of {len(e.discoveries)} discoveries have {listed}")


@DISCOVERY.check(MUST, _METHOD_2, "R11", DISCOVERIES)
def partition_stays(e: Examination) -> Findings:
    """An open partition stays listed, until others name it in `cursorFromPartitions`.
    A consumer stops reading it and reports it as vanished. After a rollback `feedapi cursors
    restore` moves its cursors back."""
    for before, now in pairwise(info for info in e.infos if info.partitions):
        inherited = {id for each in now.partitions.values() for id in each.cursor_from}
        for id, partition in before.partitions.items():
            if not partition.closed and id not in now.partitions and id not in inherited:
                yield Finding("it was open, is no longer listed, and none takes it over", id)


@DISCOVERY.check(MUST, CLOSING, "R6", DISCOVERIES, CLOSED)
def closed_final(e: Examination) -> Findings:
    """A closed partition stays closed, and its `lastCursor` stays what it is.
    A consumer is done with it: what comes later is never read."""
    for before, now in pairwise(e.infos):
        for id, partition in before.partitions.items():
            later = now.partitions.get(id)
            if not partition.closed or later is None:
                continue
            if not later.closed:
                yield Finding("it was closed, and is open in a later discovery", id)
            elif partition.last_cursor != later.last_cursor:
                yield Finding("it is closed, and its lastCursor changed", id)


@DISCOVERY.check(DEVIATION, FIELD, "R2 R10", DISCOVERIES)
def discovery_stable(e: Examination) -> Findings:
    """All replicas, versions and caches answer discovery alike, and the token changes with the
    partitions only.
    Refusals and rediscoveries in turn: a consumer gets on slowly, and stops after
    `RetryPolicy.refused_for`."""
    lineages, seen = [], []
    for info in e.infos:
        partitions = info.partitions.values()
        lineages.append({p.id: (p.closed, p.starts_after, p.cursor_from) for p in partitions})
        seen.append((info.dialect, info.token, lineages[-1]))
    for index, topology in enumerate(seen):
        if topology in seen[:index] and topology != seen[index - 1]:
            yield Finding("a discovery says what an earlier one said, and one between them did not")
            return
    changes = sum(before != now for before, now in pairwise(seen))
    if changes > 1 and all(lineage == lineages[0] for lineage in lineages):
        changed = f"dialect or token changed {changes} times in {len(seen)} discoveries"
        yield Finding(f"{changed}, although the partitions did not")


@LINEAGE.check(MUST, _METHOD_1, "R8", V2)
def parent_closed(e: Examination) -> Findings:
    """`startsAfterPartition` points to a closed partition.
    The children wait for ever: their parent never ends."""
    for id, partition in e.partitions.items():
        parent = e.partitions.get(-1 if partition.starts_after is None else partition.starts_after)
        if parent is not None and not parent.closed:
            yield Finding(f"it starts after partition {parent.id}, which is open", id)


@LINEAGE.check(MUST, _METHOD_1, "R8", V2)
def parent_listed(e: Examination) -> Findings:
    """A parent stays in the list, with the history before the split.
    A new consumer never sees that history. One that waited for the parent ends with
    `LostPartitionError`."""
    for id, partition in e.partitions.items():
        parent = partition.starts_after
        if parent is not None and parent not in e.partitions:
            yield Finding(f"it starts after partition {parent}, which is not listed", id)


@LINEAGE.check(MUST, _METHOD_2, "R9", V2)
def ancestor_gone(e: Examination) -> Findings:
    """The partitions in `cursorFromPartitions` are no longer listed.
    Their whole history is on the new partitions too: a new consumer may read it twice."""
    for id, partition in e.partitions.items():
        for ancestor in e.partitions.keys() & set(partition.cursor_from):
            text = f"it takes its cursor from partition {ancestor}, which is still listed"
            yield Finding(text, id)


@LINEAGE.check(DEVIATION, FIELD, "R12", DOCUMENT)
def lineage_names(e: Examination) -> Findings:
    """Lineage is in `startsAfterPartition` and `cursorFromPartitions`, not in `startsAfterParent`
    and `splitFromAncestors`, as one example spells them.
    Other clients don't see the lineage: they read out of order, or from the beginning."""
    for old, name in _LINEAGE.items():
        if count := sum(old in entry for entry in e.discoveries[0].entries):
            yield Finding(f"{old} in place of {name} in {counted(count, 'partition')}")


@LINEAGE.check(DEVIATION, FIELD, "R8 R12", V2)
def lineage_edge(e: Examination) -> Findings:
    """Where a partition is closed and others replace it, they name it, partition 0 included; one
    without a parent has no `startsAfterPartition`: 0 is a partition.
    Children are read beside their parent, out of order, unless each consumer gives `lineage=`."""
    for entry in e.discoveries[0].entries:
        if str(entry.get("id")) == "0" and repr(entry.get("startsAfterPartition")) == "0":
            yield Finding("startsAfterPartition is 0, which is the partition itself", 0)
    suspected = suspected_missing_edges(None, e.partitions)
    if suspected is not None:
        yield Finding(str(suspected))


FETCH = "specification, Fetch call, request"
_RESPONSE = "specification, Fetch call, response"
_CHECKPOINT = "specification, Fetch call, checkpoint command"
_FLAGS = "specification, Discovery call, flags"
_LONG_LINE = 64 * 1024
_EMPTY_PAGES = 3

READ = need("no partition was read", lambda e: any(page.ok for page in e.pages()))
EVENTS = need("no event was read", lambda e: any(page.payloads for page in e.pages()))
VISITS = need("no partition was asked", lambda e: e.visits)
LAST = need("no end was asked for", lambda e: any(v.last for v in e.visits.values()))
POLLED = need("no end was polled", lambda e: any(v.polls for v in e.visits.values()))
FOLLOWED = need("no second page was read", lambda e: any(v.pages[1:] for v in e.visits.values()))
RESUMED = need("no event came behind a cursor", lambda e: any(v.resumes for v in e.visits.values()))
EXACTLY_ONCE = need("the feed does not say exactlyOnce", lambda e: e.info and e.info.exactly_once)


@PAGES.check(MUST, FETCH, "R7 R10", VISITS)
def fetch_accepted(e: Examination) -> Findings:
    """Each listed partition can be fetched from `_first`, from `_last`, and from each cursor that
    the publisher gives, percent-encoded.
    A consumer can't start there, or not go on: after `RetryPolicy.refused_for` it ends with
    `CursorRejectedError`."""
    others = (Problem.BROKEN, Problem.CODING, Problem.NOT_ASKED)
    for answer in e.pages():
        if not answer.ok and answer.problem not in others:
            yield about(answer)


def _faults(e: Examination, check: str) -> Findings:
    for page in e.pages():
        if found := [fault for fault in page.faults if fault[0] == check]:
            _, text, said = found[0]
            times = f"{len(found)} times, first: " if found[1:] else ""
            yield about(page, f"{times}{text}", said)


@PAGES.check(MUST, _RESPONSE, "R3 R13 R14 R18", READ)
def line_sound(e: Examination) -> Findings:
    r"""A page is NDJSON: each line, up to `\n`, is a JSON object. The payload of an event is an
    object or a string. A cursor is a string of printable ASCII, not empty, of at most 16 KiB, and
    never `_first` or `_last`. In dialect v1 each line names the partition that was asked for.
    A consumer stops there with `ProtocolError`, or throws away and fetches again what follows the
    last checkpoint before the line. `_first` reads all events again; `_last` loses what was
    published since."""
    return _faults(e, "line-sound")


@PAGES.check(MUST, _RESPONSE, "R3", READ)
def payload_key(e: Examination) -> Findings:
    """Events are under `event` in a draft feed, and under `data` in the others. The keys of a line
    are in lower case.
    This library reads them all. Other clients skip the events as unknown commands: they are lost
    without an error."""
    return _faults(e, "payload-key")


def _without_cursor(e: Examination, *, closed: bool) -> Iterator[Page]:
    """Yield pages that should have a cursor: the empty ones of closed partitions, or the others."""
    ended = {p.id for info in e.infos for p in info.partitions.values() if p.closed}
    for id, visit in e.visits.items():
        for page in visit.all_pages():
            missing = page.whole and not page.checkpoints and not page.echoes
            end = id in ended and not page.payloads
            if missing and page is not visit.last and end is closed:
                yield page


@PAGES.check(MUST, _CHECKPOINT, "R3 R13", READ)
def page_cursor(e: Examination) -> Findings:
    """Every response has at least one cursor, also without an event.
    Its events come again: `NoProgressError` after a few attempts."""
    for page in _without_cursor(e, closed=False):
        events = counted(len(page.payloads), "event") if page.payloads else "no event"
        yield about(page, f"{events} and no cursor")


def _back(visit: Visit) -> Iterator[Page]:
    """Yield empty pages that lead to a place before their own, or to events that came before."""
    events, places = visit.known()
    for page in visit.all_pages():
        now = places.get(page.cursor or "", len(events))
        if not page.payloads and now < places.get(page.asked, 0):
            yield page
    for pages, before in ((visit.pages, set[bytes]()), (visit.polls, set(events))):
        for page, behind in pairwise(pages):
            before.update(page.closed_events)
            if page.moved_to and not page.payloads and not before.isdisjoint(behind.events):
                yield page


@PAGES.check(MUST, _CHECKPOINT, "R13", READ)
def cursor_progress(e: Examination) -> Findings:
    """Behind events comes a cursor that leads on, and an empty page leads to no place before the
    one that was asked for.
    The same events come again: `NoProgressError` after a few attempts, or they are delivered twice.
    Usually it is a replica that lags, and answers with its own older end."""
    for visit in e.visits.values():
        for index, page in enumerate(visit.pages, start=1):
            asked = [each.asked for each in visit.pages[:index]]
            if page.ok and page.payloads and page.cursor in asked:
                back = "the cursor asked with" if page.cursor == page.asked else "an earlier cursor"
                yield about(page, f"{counted(len(page.payloads), 'event')}, then {back}")
                break
        for page in list(_back(visit))[:1]:
            yield about(page, "no event, and a cursor behind which events come again")


@PAGES.check(MUST, FIELD, "R3 R6", READ)
def page_meaning(e: Examination) -> Findings:
    """A page that has lines has an event or a cursor, and is not the discovery document.
    It is no evidence of an end: a consumer asks again, and reports it. Usually it is a gateway, a
    maintenance page, or a redirect that drops the path or the query."""
    yield from _faults(e, "page-meaning")
    for page in e.pages():
        body = page.body.strip()
        if body and page.whole and not page.payloads and not page.checkpoints and not page.echoes:
            shown = body[:80].decode("ascii", "replace")
            yield about(page, "lines without an event or a cursor: ", repr(shown))


@PAGES.check(MUST, CLOSING, "R6", CLOSED, READ)
def closed_end(e: Examination) -> Findings:
    """Reading a closed partition ends at its `lastCursor`, and nothing comes behind it.
    Events behind it are never read. Where it is not reached, the partition is never drained and its
    children wait: `NoProgressError` after `RetryPolicy.give_up_after`."""
    for id, visit in e.visits.items():
        page, end = visit.at_last_cursor, visit.pages[-1]
        if page is not None and page.payloads:
            yield about(page, f"{counted(len(page.payloads), 'event')} behind the lastCursor")
        elif visit.partition.closed and any(poll.payloads for poll in visit.polls):
            yield Finding("it is closed, and events come behind its end", id)
        if page is not None and end.at_end and end.asked not in (FIRST, page.asked):
            yield Finding("reading it ends at another cursor than its lastCursor", id)


@PAGES.check(MUST, _FLAGS, "", EXACTLY_ONCE, EVENTS)
def exactly_once(e: Examination) -> Findings:
    """Where discovery has `exactlyOnce`, no event comes twice.
    Consumers that rely on it apply the event twice."""
    for visit in e.visits.values():
        seen: set[bytes] = set()  # of this partition: the next one may have its history, too
        for page in visit.pages:
            closed = page.closed_events if page.cursor != page.asked else []
            for payload, content in zip(page.payloads, closed, strict=False):
                if content in seen:
                    yield about(page, "an event with an id that came before")
                    return
                if isinstance(payload, dict) and "id" in payload:
                    seen.add(content)


@PAGES.check(DEVIATION, FIELD, "R7", LAST)
def last_cursor_given(e: Examination) -> Findings:
    """The answer to `_last` has a cursor.
    A consumer can't start at the end: `feedapi cursors skip` has to read all events."""
    for page in [visit.last for visit in e.visits.values() if visit.last is not None]:
        if page.whole and not page.checkpoints and not page.echoes:
            yield about(page, "no cursor")


@PAGES.check(DEVIATION, FIELD, "R3 R7", READ)
def cursor_echo(e: Examination) -> Findings:
    """An empty page has a cursor of its own, not the `_first` or `_last` that was asked with.
    It counts as no cursor. With `start="last"` a consumer can't start: `feedapi cursors skip` has
    to read all events."""
    for page in e.pages():
        if page.echoes:
            yield about(page, f"no event, and {page.asked} as the cursor")


@PAGES.check(DEVIATION, FIELD, "R6", CLOSED, READ)
def closed_end_cursor(e: Examination) -> Findings:
    """The end of a closed partition is answered with a cursor.
    It can't be told from a fault on the way: a consumer asks again, for `Limits.settle_time`."""
    for page in _without_cursor(e, closed=True):
        yield about(page, "no event and no cursor")


@PAGES.check(DEVIATION, FIELD, "R3", READ)
def final_newline(e: Examination) -> Findings:
    r"""The last line ends in `\n` too.
    It can't be told from a line that was cut. Other clients drop it."""
    for page in e.pages():
        if page.whole and page.body and not page.body.endswith(b"\n"):
            yield about(page, "the last line has no newline")


@PAGES.check(DEVIATION, FIELD, "R3", READ)
def line_length(e: Examination) -> Findings:
    """No line is longer than 64 KiB.
    This library reads lines of 16 MiB. Old clients give up at 64 KiB, silently."""
    for page in e.pages():
        longest = max(map(len, page.body.split(b"\n")))
        if longest > _LONG_LINE:
            yield about(page, f"a line of {longest} bytes or more")


@PAGES.check(DEVIATION, FIELD, "R16", READ)
def cursor_distance(e: Examination) -> Findings:
    """A cursor comes within the megabyte that is read of a page.
    A consumer keeps all of it in memory: `BufferLimitError` at `Limits.max_buffered_bytes`."""
    for page in e.pages():
        if page.cut and not page.checkpoints and page.status == 200:
            yield about(page, f"no cursor within {len(page.body)} bytes")


@PAGES.check(DEVIATION, FIELD, "R6 R15", FOLLOWED)
def empty_pages(e: Examination) -> Findings:
    """Pages that move the cursor without an event are rare.
    Many requests for nothing. The specification allows it, for events that are internal to the
    publisher."""
    for id, visit in e.visits.items():
        count = len(visit.pages)
        if count >= _EMPTY_PAGES and all(p.moved_to and not p.payloads for p in visit.pages):
            yield Finding(f"{count} pages from _first on move the cursor and hold no event", id)


@PAGES.check(DEVIATION, FIELD, "R13 R15", POLLED)
def end_stable(e: Examination) -> Findings:
    """A poll at the end of a partition gets the cursor back that it asked with.
    Each poll is a save in the consumer's database, and the end is hard to tell."""
    for id, visit in e.visits.items():
        if len(visit.polls) > 1 and all(p.moved_to and not p.payloads for p in visit.polls):
            yield Finding("polls at the end hold no event, and each moves the cursor", id)


# Only the order of an entity's events is fixed: a publisher may interleave entities anew each time,
# and go on to write meanwhile. So an event counts as lost only where all that is behind the cursor
# was read, where everything else came in the same order as before, or where none of them came.


def _lost(resume: Resume, missing: Counter[bytes]) -> int:
    if resume.complete or not missing:
        return missing.total()
    common = [event for event in resume.expected if event not in missing]
    known = set(common)
    if not common and resume.repeatable:
        return missing.total()
    if not common or [event for event in resume.events if event in known] != common:
        return 0  # interleaved anew: they may come later
    behind = resume.expected[::-1].index(common[-1])
    return sum(event in missing for event in resume.expected[: len(resume.expected) - behind])


def _differences(resume: Resume) -> Iterator[tuple[str, str]]:
    """Yield checks, and how what came behind a cursor differs from what came there before."""
    expected, got = resume.expected, resume.events
    length = min(len(expected), len(got))
    asked, came = Counter(expected[:length]), Counter(got)
    if expected[:length] == got[:length]:
        lost, again = (len(expected) - length if resume.complete else 0), 0
    else:
        once = {event for event, count in Counter(resume.before).items() if count == 1}
        fresh = came - Counter(expected)
        again = sum(count for event, count in fresh.items() if event in once)
        changed = sum(one != other for one, other in zip(expected, got, strict=False))
        if not again and fresh and changed == (asked - came).total():  # each event is in its place
            yield "event-stable", f"{counted(changed, 'event')} with another content than before"
            return
        lost = _lost(resume, Counter(expected) - came)
        if not lost and not again and resume.repeatable and asked == Counter(got[:length]):
            yield "event-order", "the same events as before, in another order"
    if lost:
        some = f"without {counted(lost, 'event')} that came there before"
        nothing = "nothing, although events came behind this cursor before"
        yield "cursor-resumes", nothing if lost == len(expected) else some
    if again:
        yield "cursor-repeats", f"{counted(again, 'event')} that came before this cursor"


def _found(e: Examination, check: str) -> Findings:
    for resume in [resume for visit in e.visits.values() for resume in visit.resumes]:
        if all(page.whole for page in resume.pages):
            for id, text in _differences(resume):
                if id == check:
                    yield about(resume.pages[0], text)


@AGAIN.check(MUST, _CHECKPOINT, "R5", RESUMED)
def cursor_resumes(e: Examination) -> Findings:
    """Events that came behind a cursor come again when it is asked for.
    A consumer that is restarted there loses them."""
    return _found(e, "cursor-resumes")


@AGAIN.check(MUST, _CHECKPOINT, "R5", RESUMED)
def cursor_repeats(e: Examination) -> Findings:
    """No event that came before a cursor comes again behind it.
    A consumer that is restarted there handles it twice."""
    yield from _found(e, "cursor-repeats")
    visits = [[page for page in v.pages if page.events] for v in e.visits.values()]
    seams = [seam for pages in visits for seam in pairwise(pages)]
    # Payloads may be equal: but not in no page, and at each place where one page follows another.
    if all(_distinct(page) and _overlaps(page, behind) for page, behind in seams):
        for _, behind in seams:
            yield about(behind, "it begins with the events that came before this cursor")


def _distinct(page: Page) -> bool:
    return HINT < len(page.events) == len(set(page.events))


def _overlaps(page: Page, behind: Page) -> bool:
    before, events = page.closed_events, behind.events
    again = before[before.index(events[0]) :] if events[0] in before else []
    return bool(again) and events[: len(again)] == again


@AGAIN.check(SHOULD, _CHECKPOINT, "R4 R5", RESUMED)
def event_order(e: Examination) -> Findings:
    """The events behind a cursor come in the same order each time.
    Where they are of one entity, they are handled out of order. Entities may be interleaved anew,
    but who does that does it each time."""
    resumes = [resume for visit in e.visits.values() for resume in visit.resumes]
    anew = any(resume.repeatable is False for resume in resumes)
    return iter(()) if anew else _found(e, "event-order")


@AGAIN.check(DEVIATION, FIELD, "", RESUMED)
def event_stable(e: Examination) -> Findings:
    """An event has the same content each time it is read.
    A consumer that is restarted may handle other data than the one before it."""
    return _found(e, "event-stable")


_AUTHORIZATION = "specification, Authorization"
_HTTP = "RFC 9110 and 9112"
_PUBLISHED = "FeedAPI as published"
_MAX_AGE = re.compile(r"(?:s-maxage|max-age)\s*=\s*\"?([0-9]+)", re.IGNORECASE)


def probe(name: str, reason: str = "not asked, because no partition could be read") -> Need:
    return need(
        reason, lambda e: name in e.probes and e.probes[name].problem is not Problem.NOT_ASKED
    )


ANONYMOUS = probe("anonymous", "no credentials were given")
STREAM = probe("stream", "no streamed response is offered, or no partition is open")


def _one(answers: list[Answer], text: str = "") -> Findings:
    if answers:
        more = f", and {counted(len(answers) - 1, 'more request')}" if answers[1:] else ""
        yield about(answers[0], f"{text or answers[0]}{more}")


@RESPONSES.check(MUST, _HTTP, "R3 R14 R16")
def http_complete(e: Examination) -> Findings:
    """A response is complete: its framing and its content coding are intact.
    What no checkpoint closed is thrown away and fetched again."""
    broken = (Problem.BROKEN, Problem.CODING)
    return _one([answer for answer in e.answers() if answer.problem in broken])


@RESPONSES.check(MUST, f"{_PUBLISHED}, token", "R10", TOKEN, VISITS)
def token_current(e: Examination) -> Findings:
    """A fetch with the token of the newest discovery is not refused with 409.
    A fetch is refused again and again; after `RetryPolicy.refused_for` the partition stops."""
    if count := e.current_token_refused:
        same = "the discovery behind them has the same token"
        yield Finding(f"{counted(count, 'fetch', 'fetches')} refused with 409, and {same}")


@RESPONSES.check(SHOULD, _AUTHORIZATION, "R1", ANONYMOUS)
def auth_status(e: Examination) -> Findings:
    """A request without credentials gets status 401 or 403.
    A consumer with wrong credentials retries, or reports that there is no feed here."""
    answer = e.probes["anonymous"]
    needless = answer.problem is None and answer.status == e.discoveries[0].status
    if answer.status not in (401, 403) and not needless:
        yield about(answer)


@RESPONSES.check(SHOULD, FIELD, "R14")
def http_time(e: Examination) -> Findings:
    """A response is complete within the time limit of this examination.
    The request takes one of the consumer's slots, and is repeated."""
    return _one([failure for failure in e.prober.failures if failure.problem is Problem.SLOW])


@RESPONSES.check(SHOULD, FIELD, "R14")
def http_stable(e: Examination) -> Findings:
    """A request is answered at the first attempt, and not limited to fewer than a consumer of all
    partitions makes.
    Each failure is a pause, and what no checkpoint closed is fetched again. At a limit the consumer
    slows down as a whole, to the rate that is granted."""
    good = sum(answer.ok for answer in e.answers())
    for limited in (False, True):
        failed = [each for each in e.prober.failures if each.limited is limited]
        if limited and failed:
            beside = f"{counted(len(failed), 'time')} beside {counted(good, 'answer')}"
            yield about(failed[0], f"{failed[0]}, {beside}")
        elif passed := [each for each in failed if each.recovered]:
            yield from _one(passed, f"{passed[0]}, and success when repeated")


@RESPONSES.check(DEVIATION, FIELD, "R19")
def http_redirect(e: Examination) -> Findings:
    """Requests are answered at the feed's own URL.
    Within one origin, a second round trip for each request. To another one, nothing is read:
    credentials are not sent there."""
    yield from _one([each for each in e.answers() if each.problem is Problem.REDIRECT])
    yield from _one([each for each in e.answers() if each.redirects], "a redirect to the origin")


@RESPONSES.check(DEVIATION, _HTTP, "R16")
def http_coding(e: Examination) -> Findings:
    """A response is compressed only where the request accepts it.
    Clients that can't undo the coding read nothing."""
    plain = [answer for answer in e.answers() if answer.identity]
    coded = [a for a in plain if a.headers.get("content-encoding", "identity") != "identity"]
    return _one(coded, "compressed although the request has Accept-Encoding: identity")


@RESPONSES.check(DEVIATION, FIELD, "R3", READ)
def http_status(e: Examination) -> Findings:
    """A page has status 200, an empty one too.
    This library takes any 2xx for a page. Others end with an error."""
    return _one([page for page in e.pages() if page.ok and page.status != 200])


@RESPONSES.check(DEVIATION, FIELD, "R10")
def http_cache(e: Examination) -> Findings:
    """No response comes from a cache, or may be stored in one.
    Consumers see partitions and events late, and lists of partitions that contradict the
    fetches."""
    for answer in [answer for answer in e.answers() if answer.ok]:
        age = answer.headers.get("age", "0").strip()
        control = answer.headers.get("cache-control", "")
        fresh = any(map(int, _MAX_AGE.findall(control)))
        if age.isdigit() and int(age):
            yield about(answer, f"Age: {age}")
            return
        if fresh and "no-store" not in control and "no-cache" not in control:
            yield about(answer, "Cache-Control: ", control[:60])
            return


def _refused(e: Examination, name: str, *statuses: int) -> Findings:
    answer = e.probes[name]
    if answer.status not in statuses or answer.problem is not None:
        yield about(answer)


@ARGUMENTS.check(MUST, FETCH, "R15", probe("page-size"))
def argument_accepted(e: Examination) -> Findings:
    """`pageSizeHint` is accepted (`pagesizehint` in the dialects v1 and v2-token), `headers=_all`
    in v1, `event-types` in v2-token, a filter that discovery lists in v2-draft, and `stream` where
    discovery has it.
    A consumer that asks with `FetchOptions` for one of them reads nothing."""
    for name, page in e.probes.items():
        listed = name.startswith("filter-")  # 400 may mean that the value is none of this filter
        missing = page.problem is Problem.NOT_ASKED
        fine = page.ok or missing or (listed and page.status == 400)
        if not fine and (listed or name in ("page-size", "event-types", "v1-headers", "stream")):
            yield about(page)


@ARGUMENTS.check(MUST, FETCH, "", DRAFT, probe("unknown-filter"))
def filter_unknown(e: Examination) -> Findings:
    """A filter that is not supported is refused with status 400, not ignored.
    A consumer gets events that it did not select."""
    return _refused(e, "unknown-filter", 400)


@ARGUMENTS.check(MUST, _PUBLISHED, "R10", TOKEN, probe("stale-token"))
def token_stale(e: Examination) -> Findings:
    """A fetch with a token that is not current is refused with status 409.
    Consumers hear of a split only at their next discovery, up to a minute late."""
    return _refused(e, "stale-token", 409)


@ARGUMENTS.check(MUST, FETCH, "R3 R15", STREAM)
def stream_sound(e: Examination) -> Findings:
    """A response with `stream=MILLISECONDS` has a cursor, also without an event, and ends when that
    time is over.
    A consumer that starts at the end learns its position only with the first event; each response
    ends by its idle timeout, and the connection with it."""
    page = e.probes["stream"]
    if page.ok and not page.checkpoints:
        yield about(page, "no cursor")
    if page.ok and page.cut:
        yield about(page, f"not ended after {page.seconds:.1f} s")


@ARGUMENTS.check(SHOULD, FETCH, "", probe("page-size"), EVENTS)
def page_size_honoured(e: Examination) -> Findings:
    """A page has about as many events as `pageSizeHint` says.
    Consumers can't choose between latency and throughput."""
    page = e.probes["page-size"]
    usual = e.visits[page.partition or 0].pages[0]
    if len(page.payloads) > HINT and len(page.payloads) >= len(usual.payloads):
        yield about(page, f"{counted(len(page.payloads), 'event')}, where {HINT} were asked for")


@ARGUMENTS.check(SHOULD, FETCH, "R14 R15", STREAM)
def stream_live(e: Examination) -> Findings:
    """A streamed response of an open partition stays open for the time asked for, and sends each
    event when it is there.
    Streaming comes to polling, without pauses; or a consumer gets events only when the response
    ends, reports that and polls. Usually a proxy buffers: nginx needs `proxy_buffering off`."""
    half = e.prober.bounds.stream_milliseconds / 2000
    answer = e.probes["stream"]
    if answer.ok and answer.ended and answer.seconds < half:
        yield about(answer, f"ended after {answer.seconds * 1000:.0f} ms")
    behind = e.probes.get("stream-behind")
    if behind is not None and behind.ok and behind.first_byte > half:
        yield about(behind, f"the first byte came after {behind.first_byte:.1f} s")


@ARGUMENTS.check(DEVIATION, FIELD, "R10", probe("bad-cursor"))
def refusal_status(e: Examination) -> Findings:
    """A partition that is not listed and a cursor that means no place get status 400, 404, 409 or
    410; in dialect v1 a wrong number of partitions `n` gets status 400.
    A consumer can't tell a partition that is gone from an empty one, and takes a refused cursor for
    an outage, for `RetryPolicy.give_up_after`. With a wrong `v1_partitions` it leaves partitions
    out, silently."""
    refusals = (400, 404, 409, 410)
    for name, statuses in (("unknown-partition", refusals), ("wrong-count", (400,))):
        if not probe(name)(e):
            yield from _refused(e, name, *statuses)
    page = e.probes["bad-cursor"]
    if page.status not in refusals and not (page.whole and page.checkpoints):
        yield about(page, "a page that breaks the protocol" if page.ok else "")
