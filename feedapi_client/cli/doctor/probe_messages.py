"""A request of the examination, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from feedapi_client.protocol.dialects import Params

_LATER = frozenset({408, 425, 429})
_CHANGED = frozenset({400, 404, 409, 410})


class ProbeProblem(StrEnum):
    """Why there is no complete response."""

    NO_ANSWER = "no answer"
    BROKEN = "the response broke off"
    SLOW = "not complete in time"
    CODING = "the content coding can't be undone"
    REDIRECT = "redirected to where no credentials are sent"
    NOT_ASKED = "not asked: the bounds of this examination are reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """One GET request.

    Attributes:
        what: what it asks for, in words, for findings.
        suffix: what follows the path of the feed.
        params: the query, not encoded.
        partition, cursor: of a fetch.
        max_bytes: of the body, decoded; the rest is not received.
        seconds: for a streamed response: when to stop reading. That is no problem then.
        identity: whether to accept no content coding.
        anonymous: whether to leave out all credentials.
    """

    what: str
    suffix: str = ""
    params: Params = field(default_factory=list)
    partition: int | None = None
    cursor: str | None = None
    max_bytes: int
    seconds: float | None = None
    identity: bool = False
    anonymous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResponse:
    """What a request came to.

    Attributes:
        status: of the response; None without one.
        body: what was received of it, its coding undone.
        problem, detail: why it is not complete; None and "" when it is.
        cut: whether more would have come, which was not read.
        ended: whether the publisher ended it.
        seconds: from the request to the end of the response.
        first_byte: from the request to the first byte of the body; None without one.
        redirects: the number of redirects that were followed.
    """

    question: ProbeRequest
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    problem: ProbeProblem | None = None
    detail: str = ""
    cut: bool = False
    ended: bool = True
    seconds: float = 0.0
    first_byte: float | None = None
    redirects: int = 0

    @property
    def ok(self) -> bool:
        """Whether it is a complete response with a status of success, apart from a cut."""
        return self.problem is None and self.status is not None and 200 <= self.status < 300

    @property
    def asked(self) -> bool:
        """Whether the request was made at all."""
        return self.problem is not ProbeProblem.NOT_ASKED

    @property
    def may_pass(self) -> bool:
        """Whether the same request may be answered a moment later (R14)."""
        if self.problem is not None:
            return self.problem in (ProbeProblem.NO_ANSWER, ProbeProblem.BROKEN, ProbeProblem.SLOW)
        return self.status is not None and (self.status >= 500 or self.status in _LATER)

    @property
    def limited(self) -> bool:
        """Whether the publisher asks for fewer requests (R14)."""
        late = {name.lower() for name in self.headers}
        return self.problem is None and (
            self.status == 429 or (self.status == 503 and "retry-after" in late)
        )

    @property
    def refused(self) -> bool:
        """Whether it may be refused because of a topology that has changed meanwhile (R10)."""
        return self.problem is None and self.status in _CHANGED

    @property
    def unanswered(self) -> bool:
        """Whether nobody answered."""
        return self.problem in (ProbeProblem.NO_ANSWER, ProbeProblem.SLOW) and self.status is None

    def __str__(self) -> str:
        """Say what came, for a finding."""
        if self.problem is not None:
            return f"{self.problem} ({self.detail})" if self.detail else str(self.problem)
        return f"status {self.status}{': ' if self.detail else ''}{self.detail}"
