"""What `FeedConsumer.run` does when the handler fails: raise, try again, or quarantine an event.

A cursor exists only behind a batch, so that a failing event can't be stepped over by itself: the
effects of the other events, the quarantined events and the cursor become durable together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from feedapi_client.arguments import check_fields, check_instance
from feedapi_client.model import Batch
from feedapi_client.quarantine.quarantine_store import QuarantineStore
from feedapi_client.retry import Backoff

Handler = Callable[[Batch], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """Put events that the handler can't handle into quarantine, and go on.

    Arguments:
        to: where to keep the events; by default in the database, file or memory of the consumer's
            cursor store. If cursors and quarantine are in one database, the events are saved in
            the transaction that saves the cursor. Otherwise they are saved before it, so that a
            crash in between quarantines them twice and never loses one.
        limit: maximum number of consecutive events of a partition to quarantine. The error of the
            next one is raised: the cause is then probably not the events.
        errors: the exceptions that may be an event's fault. Errors of a store never are.
        whole_key: put later events of the same key aside, too, in their order, until the earlier
            ones are replayed or dropped, so that the order of each entity holds even then. Only
            for `FeedConsumer.run_by_key`; such events do not count for `limit`.
    """

    to: QuarantineStore | None = None
    limit: int = 100
    errors: tuple[type[Exception], ...] = (Exception,)
    whole_key: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_instance("Quarantine.to", self.to, QuarantineStore, "a quarantine store or None")
        _check_errors("Quarantine.errors", self.errors)
        if self.limit < 1:
            raise ValueError(f"Quarantine.limit must be at least 1, not {self.limit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Call the handler with the same batch again when it failed.

    The pause before the next attempt is random, up to ``min(max_delay, base_delay * 2**n)``
    seconds. The other partitions go on meanwhile; the batch keeps its place in `max_concurrency`.

    Arguments:
        attempts: number of calls in all; None: unlimited.
        base_delay, max_delay: seconds.
        errors: the exceptions worth another attempt.
        then: what follows the last attempt: "raise", or a `Quarantine`, which takes an event only
            after as many attempts with the events that end with it.
    """

    attempts: int | None = 5
    base_delay: float = 0.2
    max_delay: float = 20.0
    errors: tuple[type[Exception], ...] = (Exception,)
    then: Literal["raise"] | Quarantine = "raise"

    def __post_init__(self) -> None:
        check_fields(self)
        _check_errors("Retry.errors", self.errors)
        if self.attempts is not None and self.attempts < 1:
            raise ValueError(f"Retry.attempts must be at least 1, not {self.attempts}")
        if self.base_delay <= 0 or self.max_delay < self.base_delay:
            raise ValueError("Retry.base_delay must be positive, and max_delay not smaller")
        if self.then != "raise" and not isinstance(self.then, Quarantine):
            raise ValueError(f"Retry.then must be 'raise' or a Quarantine, not {self.then!r}")

    def backoff(self, retry_if: Callable[[Exception], bool] = lambda _: True) -> Backoff:
        """Return the backoff for one call; an error must also satisfy `retry_if` to be retried."""
        return Backoff(
            base_delay=self.base_delay,
            max_delay=self.max_delay,
            # A handler may itself call a service that asks to wait. The bound stays this policy's.
            max_retry_after=self.max_delay,
            attempts=self.attempts,
            retry_if=lambda error: isinstance(error, self.errors) and retry_if(error),
        )


def _check_errors(name: str, errors: object) -> None:
    kinds = errors if isinstance(errors, tuple) else ()
    if not kinds or not all(isinstance(k, type) and issubclass(k, Exception) for k in kinds):
        raise TypeError(f"{name} must be a tuple of subclasses of Exception, not {errors!r}")


OnFailure = Literal["raise", "retry", "quarantine"] | Retry | Quarantine


def parse_on_failure(on_failure: OnFailure) -> Retry:
    """Return how often to call the handler, and what follows the last call."""
    if isinstance(on_failure, str):
        once = Retry(attempts=1)
        words: dict[str, OnFailure] = {"raise": once, "retry": Retry(), "quarantine": Quarantine()}
        on_failure = words.get(on_failure, on_failure)
    if isinstance(on_failure, Quarantine):
        on_failure = Retry(attempts=1, then=on_failure)
    if not isinstance(on_failure, Retry):
        raise ValueError(
            "on_failure must be 'raise', 'retry', 'quarantine', a Retry or a Quarantine, "
            f"not {on_failure!r}"
        )
    return on_failure
