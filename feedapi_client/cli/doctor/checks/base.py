"""One row of the table of checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from feedapi_client.cli.doctor.evidence import Evidence


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


@dataclass(frozen=True, slots=True)
class Need:
    """What a check can't do without. `reason` says why it was not done."""

    reason: str
    met: Callable[[Evidence], bool]


Find = Callable[[Evidence], Iterator[Finding]]


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

    def missing(self, evidence: Evidence) -> str | None:
        """Return why the check can't be done; None when it can."""
        return next((need.reason for need in self.needs if not need.met(evidence)), None)
