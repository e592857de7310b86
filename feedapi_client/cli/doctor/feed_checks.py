"""What a check is, and the checks of discovery and of the lineage of partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

from feedapi_client.cli.doctor.examination import Examination
from feedapi_client.cli.doctor.prober import Answer
from feedapi_client.cli.doctor.wire import Discovery
from feedapi_client.errors import LineageError
from feedapi_client.lineage.graph import suspected_missing_edges, validate
from feedapi_client.model import FeedInfo
from feedapi_client.protocol.text import counted

LEVELS = MUST, SHOULD, DEVIATION = "MUST", "SHOULD", "deviation"
"""How binding a requirement is, the most binding first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is not as a check requires, in one sentence; `level` where it is not the check's.

    `said` goes on with words of the publisher, which may hold a secret.
    """

    text: str
    partition: int | None = None
    level: str = ""
    said: str = ""


def about(answer: Answer, text: str = "", said: str = "", level: str = "") -> Finding:
    """Return what is wrong with an answer; without a text, what came."""
    what = f"{answer.question.what}: {text or answer}"
    return Finding(what, answer.question.partition, level, said)


Findings = Iterator[Finding]
Find = Callable[[Examination], Findings]
Need = Callable[[Examination], str]
"""Returns why a check can't be done, "" where it can."""


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement to a publisher, and what a consumer pays where it is not met.

    `rules` of consumption deal with it. Without one of `needs` it is not done.
    """

    id: str
    requirement: str
    cost: str
    level: str
    source: str
    rules: list[str]
    needs: tuple[Need, ...]
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
            self.append(Check(id, *texts, level, source, rules.split(), needs, find))
            return find

        return add


DISCOVERY = Section("Discovery")
LINEAGE = Section("Lineage")

FIELD = "publishers in the field"
CLOSING = "specification, Partitions, starting and closing partitions"
PARTITIONS = "specification, Discovery call, partitions"
_NEGOTIATION = "specification, Protocol negotiation"
_METHOD_1 = "specification, Partitions, method 1"
_METHOD_2 = "specification, Partitions, method 2"


def need(reason: str, met: Callable[[Examination], object]) -> Need:
    """Return a need with a fixed reason."""
    return lambda e: "" if met(e) else reason


def dialects(*names: str) -> Need:
    """Return the need of a dialect."""
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
    answer, document = found.answer, found.document
    if answer.problem is None and answer.status == 400 and found.info is not None:
        return ""
    if answer.problem is not None or answer.status != 200:
        return str(answer)
    if answer.cut:
        return f"longer than {len(answer.body)} bytes, which is as much as was read"
    listed = None if document is None else document.get("partitions", False)
    if document is None or not (listed is None or isinstance(listed, list)):
        return "status 200 with a body that is no JSON object with a list of partitions"
    return ""


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
        validate(e.info or FeedInfo("v2-draft", {}))
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


@DISCOVERY.check(MUST, PARTITIONS, "R6", V2, CLOSED)
def last_cursor_listed(e: Examination) -> Findings:
    """A closed partition has `lastCursor` (in a published feed its absence is a deviation).
    A consumer can't tell the end from a replica that lags: it asks again for `Limits.settle_time`,
    before the children begin."""
    published = e.info is not None and e.info.dialect == "v2-token"
    for id, partition in e.partitions.items():
        if partition.closed and partition.last_cursor is None:
            text = "it is closed and has no lastCursor"
            yield Finding(text, id, DEVIATION if published else "")


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
