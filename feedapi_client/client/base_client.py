"""What both clients share: options, checks, the reader of a response."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from hashlib import sha256
from typing import Any

from feedapi_client.arguments import check_function, check_instance
from feedapi_client.errors import ProtocolError, RequestRefusedError
from feedapi_client.http.exchange import Endpoint
from feedapi_client.lineage import graph
from feedapi_client.model import Decoder, FeedInfo
from feedapi_client.options import (
    FetchOptions,
    Limits,
    RetryPolicy,
    default_decision,
    entry_decision,
)
from feedapi_client.protocol.decoder import PageDecoder
from feedapi_client.protocol.dialects import DIALECTS, Dialect, Params, check_options
from feedapi_client.protocol.negotiation import check_v1_partitions, negotiate
from feedapi_client.protocol.page import PageReader, Progress

log = logging.getLogger(__name__)

WRONG_COUNT = re.compile(r"partition count (mismatch|does ?n.t match)", re.IGNORECASE)
"""What publishers of dialect v1 say when `n` is not their number of partitions."""


class BaseClient:
    """Options and checks that both clients share."""

    def __init__(
        self,
        endpoint: Endpoint[Any],
        v1_partitions: int | None,
        fetch: FetchOptions | None,
        retry: RetryPolicy | None,
        limits: Limits,
        decoder: Decoder,
        any_payload: bool = False,
    ) -> None:
        check_v1_partitions(v1_partitions)
        check_instance("fetch", fetch, FetchOptions, "FetchOptions or None")
        check_instance("retry", retry, RetryPolicy, "a RetryPolicy or None")
        check_function("decoder", decoder)
        self.feed = endpoint.feed
        """The feed's URL without credentials and query."""
        self._quote = endpoint.quote
        self.v1_partitions = v1_partitions
        self.options = fetch or FetchOptions()
        self._selects_events = bool(self.options.selection())
        self.retry = retry or RetryPolicy()
        self.limits = limits
        self.decoder = decoder
        self._any_payload = any_payload
        self.info: FeedInfo | None = None
        """The last discovery."""
        self._known: tuple[bytes, FeedInfo] | None = None
        """Digest of the last response that was understood, and what it said."""

    def check(self, info: FeedInfo) -> None:
        """Check a discovery against this client's options.

        Raises `LineageError` when the partitions make no valid graph, `ProtocolError` when the
        options select events in a way that the feed can't carry.
        """
        graph.validate(info, feed=self.feed)
        check_options(info, self.options, feed=self.feed)

    def _understand(self, status: int, body: bytes) -> FeedInfo:
        """Return what a discovery says, checked.

        One that says the same as the last, as most do, is not read again, which for 32,768
        partitions would take some 20 ms. It is a `FeedInfo` of its own all the same, because that
        shows that there was a discovery.
        """
        digest = sha256(b"%d %b" % (status, body)).digest()
        if self._known is None or self._known[0] != digest:
            info = negotiate(
                status,
                body,
                feed=self.feed,
                v1_partitions=self.v1_partitions,
                quote=self._quote,
            )
            self.check(info)
            self._known = digest, info
        self.info = replace(self._known[1])
        return self.info

    def _discovery_policy(self) -> RetryPolicy:
        """Before anything is known, a wrong URL is likelier than an outage of DNS (R14)."""
        if self.info is None and self.retry.decide is default_decision:
            return replace(self.retry, decide=entry_decision)
        return self.retry

    def _plan(
        self, info: FeedInfo, partition: int, cursor: str, stream: bool | int
    ) -> tuple[Dialect, Params, float | None]:
        dialect = DIALECTS[info.dialect]
        idle_timeout = None
        if stream is not False and info.stream:
            # A reader that keeps its own idle time, as the consumer does, ends the response before
            # the transport calls it broken.
            idle_timeout = self.limits.stream_idle_timeout + self.limits.request_timeout
        params = dialect.fetch_params(info, partition, cursor, self.options, stream=stream)
        return dialect, params, idle_timeout

    def _page_reader(
        self, info: FeedInfo, partition: int, cursor: str, progress: Progress | None
    ) -> PageReader:
        listed = info.partitions.get(partition)
        decoder = PageDecoder(
            DIALECTS[info.dialect],
            feed=self.feed,
            partition=partition,
            decoder=self.decoder,
            max_line_bytes=self.limits.max_line_bytes,
            quote=self._quote,
            any_payload=self._any_payload,
        )
        return PageReader(
            decoder,
            feed=self.feed,
            partition=partition,
            asked=cursor,
            closed=listed is not None and listed.closed,
            last_cursor=None if listed is None or self._selects_events else listed.last_cursor,
            progress=progress,
            max_unclosed_bytes=self.limits.max_buffered_bytes,
        )

    def __repr__(self) -> str:
        known = "not discovered yet"
        if self.info is not None:
            known = f"{self.info.dialect}, {len(self.info.partitions)} partitions"
        return f"<{type(self).__name__} {self.feed}: {known}>"


def check_count(error: RequestRefusedError, info: FeedInfo) -> None:
    """Raise ProtocolError where a v1 publisher refuses our number of partitions.

    No discovery and no other cursor repairs that.
    """
    if info.dialect == "v1" and error.status == 400 and WRONG_COUNT.search(error.message):
        raise ProtocolError(
            f"{error.message}. The feed has another number of partitions than "
            f"v1_partitions={len(info.partitions)}: give the number that its publisher documents",
            feed=error.feed,
            partition=error.partition,
        ) from error


def log_attempt(error: Exception, attempt: int, pause: float) -> None:
    """Log that a request is about to be repeated."""
    log.warning("%s; attempt %d in %.1f s", error, attempt, pause)
