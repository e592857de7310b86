"""Checks of what comes behind a cursor that is asked for a second time.

Only the order of an entity's events is fixed: a publisher may interleave entities anew each time,
and go on to write meanwhile. So an event counts as lost only where all that is behind the cursor
was read, or where everything else came in the same order as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from feedapi_client.cli.doctor import needs
from feedapi_client.cli.doctor.check import CheckSection, Finding, Level
from feedapi_client.cli.doctor.evidence import FeedEvidence, Resume

_FIELD = "publishers in the field"
_CHECKPOINT = "specification, Fetch call, checkpoint command"

SECTION = CheckSection("Cursors asked for again")


class Comparison(NamedTuple):
    """How many events are lost, came again, and have changed; whether the order is another one."""

    lost: int = 0
    again: int = 0
    changed: int = 0
    reordered: bool = False


def _lost(resume: Resume, expected: list[bytes], got: list[bytes]) -> int:
    missing = Counter(expected) - Counter(got)
    if resume.complete or not missing:
        return missing.total()
    common = [event for event in expected if event not in missing]
    came = [event for event in got if event in set(common)]
    if not common or came != common:
        return 0  # interleaved anew: they may come later
    last = max(index for index, event in enumerate(expected) if event == common[-1])
    return sum(event in missing for event in expected[:last])


def _same_set(expected: list[bytes], got: list[bytes]) -> bool:
    length = min(len(expected), len(got))
    return Counter(expected[:length]) == Counter(got[:length])


def judge(resume: Resume) -> Comparison:
    """Compare the events that came behind a cursor with those that came there before."""
    expected, got = resume.expected, resume.events()
    length = min(len(expected), len(got))
    if expected[:length] == got[:length]:
        return Comparison(lost=len(expected) - length if resume.complete else 0)
    once = {event for event, count in Counter(resume.before).items() if count == 1}
    fresh = Counter(got) - Counter(expected)
    again = sum(count for event, count in fresh.items() if event in once)
    changed = sum(one != other for one, other in zip(expected, got, strict=False))
    lost = _lost(resume, expected, got)
    if not again and fresh and changed == sum((Counter(expected[:length]) - Counter(got)).values()):
        return Comparison(changed=changed)  # each event is in its place
    reordered = not lost and not again and resume.repeatable is True and _same_set(expected, got)
    return Comparison(lost=lost, again=again, reordered=reordered)


def _verdicts(evidence: FeedEvidence) -> Iterator[tuple[Resume, Comparison]]:
    for visit in evidence.visits.values():
        for resume in visit.resumes:
            if all(page.whole for page in resume.pages):
                yield resume, judge(resume)


@SECTION.check(
    "cursor-resumes",
    Level.MUST,
    requirement="Events that came behind a cursor come again when it is asked for.",
    cost="A consumer that is restarted there loses them.",
    source=_CHECKPOINT,
    rules=("R5",),
    needs=(needs.RESUMED,),
)
def _loses_nothing(evidence: FeedEvidence) -> Iterator[Finding]:
    for resume, verdict in _verdicts(evidence):
        if verdict.lost == len(resume.expected):
            yield Finding.about(
                resume.pages[0].answer,
                "nothing, although events came behind this cursor before",
            )
        elif verdict.lost:
            yield Finding.about(
                resume.pages[0].answer,
                f"{verdict.lost} of the events that came before are missing",
            )


@SECTION.check(
    "cursor-repeats",
    Level.MUST,
    requirement="No event that came before a cursor comes again behind it.",
    cost="A consumer that is restarted there handles it twice.",
    source=_CHECKPOINT,
    rules=("R5",),
    needs=(needs.RESUMED,),
)
def _repeats_nothing(evidence: FeedEvidence) -> Iterator[Finding]:
    for resume, verdict in _verdicts(evidence):
        if verdict.again:
            yield Finding.about(
                resume.pages[0].answer,
                f"{verdict.again} events that came before this cursor",
            )


@SECTION.check(
    "event-order",
    Level.SHOULD,
    requirement="The events behind a cursor come in the same order each time.",
    cost="Where they are of one entity, they are handled out of order. Entities may be "
    "interleaved anew, but who does that does it each time.",
    source=_CHECKPOINT,
    rules=("R4", "R5"),
    needs=(needs.RESUMED,),
)
def _keeps_order(evidence: FeedEvidence) -> Iterator[Finding]:
    verdicts = list(_verdicts(evidence))
    if any(resume.repeatable is False for resume, _ in verdicts):
        return  # this publisher interleaves anew each time
    for resume, verdict in verdicts:
        if verdict.reordered:
            yield Finding.about(
                resume.pages[0].answer, "the same events as before, in another order"
            )


@SECTION.check(
    "event-stable",
    Level.DEVIATION,
    requirement="An event has the same content each time it is read.",
    cost="A consumer that is restarted may handle other data than the one before it.",
    source=_FIELD,
    needs=(needs.RESUMED,),
)
def _keeps_content(evidence: FeedEvidence) -> Iterator[Finding]:
    for resume, verdict in _verdicts(evidence):
        if verdict.changed:
            yield Finding.about(
                resume.pages[0].answer,
                f"{verdict.changed} events with another content than before",
            )
