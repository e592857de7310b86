"""What a check is, and a section of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from feedapi_client.cli.doctor.evidence import FeedEvidence
from feedapi_client.cli.doctor.probe_messages import ProbeResponse


class Level(StrEnum):
    """How binding a requirement is."""

    MUST = "MUST"
    SHOULD = "SHOULD"
    DEVIATION = "deviation"


@dataclass(frozen=True, slots=True)
class Finding:
    """What is not as a check requires, in one sentence."""

    text: str
    partition: int | None = None

    @classmethod
    def about(cls, answer: ProbeResponse, text: str = "") -> Finding:
        """Return what is wrong with a response; without a text, what came."""
        request = answer.question
        return cls(f"{request.what}: {text or answer}", request.partition)


@dataclass(frozen=True, slots=True)
class Need:
    """What a check can't do without. `reason` says why it was not done."""

    reason: str
    met: Callable[[FeedEvidence], bool]


Find = Callable[[FeedEvidence], Iterator[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One requirement to a publisher.

    Attributes:
        id: for people and scripts; the anchor in the documentation too.
        level: how binding it is.
        requirement: what a sound publisher does.
        cost: what a consumer pays where it is not so.
        source: the section of the specification, or the other document, that says it.
        rules: the rules of consumption that deal with it.
        needs: without one of these the check is not done.
        find: yields what is wrong.
    """

    id: str
    level: Level
    requirement: str
    cost: str
    source: str
    rules: tuple[str, ...]
    needs: tuple[Need, ...]
    find: Find

    def missing(self, evidence: FeedEvidence) -> str | None:
        """Return why the check can't be done; None when it can."""
        return next((need.reason for need in self.needs if not need.met(evidence)), None)


class CheckSection:
    """Checks of one subject.

    Attributes:
        heading: what they stand under in the documentation.
        checks: in the order of the module that declares them.
    """

    def __init__(self, heading: str) -> None:
        self.heading = heading
        self.checks: list[Check] = []

    def check(
        self,
        id: str,
        level: Level,
        *,
        requirement: str,
        cost: str,
        source: str,
        rules: tuple[str, ...] = (),
        needs: tuple[Need, ...] = (),
    ) -> Callable[[Find], Find]:
        """Return a decorator that adds a check. The function finds what is wrong (see `Check`)."""

        def add(find: Find) -> Find:
            self.checks.append(
                Check(
                    id=id,
                    level=level,
                    requirement=requirement,
                    cost=cost,
                    source=source,
                    rules=rules,
                    needs=needs,
                    find=find,
                )
            )
            return find

        return add
