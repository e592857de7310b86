"""What checks can't do without."""

from __future__ import annotations

from feedapi_client.cli.doctor.check import Need
from feedapi_client.cli.doctor.evidence import FeedEvidence, Visit
from feedapi_client.model import DialectName


def _visits(evidence: FeedEvidence) -> list[Visit]:
    return list(evidence.visits.values())


def dialects(*names: DialectName) -> Need:
    """Return the need of a dialect."""
    return Need(f"only in dialect {' and '.join(names)}", lambda e: e.dialect in names)


def probe(name: str, reason: str) -> Need:
    """Return the need of a single request (see `feedapi_client.cli.doctor.examination`)."""
    return Need(reason, lambda e: name in e.probes and e.probes[name].asked)


DOCUMENT = Need(
    "no discovery document",
    lambda e: e.first is not None and e.first.document is not None,
)
INFO = Need("the discovery can't be used", lambda e: e.info is not None)
PAGES = Need("no partition was read", lambda e: any(page.answer.ok for _, page in e.pages()))
VISITS = Need("no partition was asked", lambda e: bool(e.visits))
EVENTS = Need("no event was read", lambda e: any(page.payloads for _, page in e.pages()))
FOLLOWED = Need(
    "no partition has a second page", lambda e: any(len(v.pages) > 1 for v in _visits(e))
)
RESUMED = Need(
    "no page holds events on both sides of a checkpoint",
    lambda e: any(v.resumes for v in _visits(e)),
)
LAST = Need("no end was asked for", lambda e: any(v.last is not None for v in _visits(e)))
POLLED = Need("no end was polled", lambda e: any(v.polls for v in _visits(e)))
CLOSED = Need("no partition is closed", lambda e: any(p.closed for p in e.partitions.values()))
CLOSED_READ = Need(
    "no closed partition with lastCursor was read to its end",
    lambda e: any(v.at_last_cursor is not None and v.pages[-1].at_end for v in _visits(e)),
)
DISCOVERIES = Need("only one discovery", lambda e: len(e.discoveries) > 1)
EXACTLY_ONCE = Need(
    "the feed does not say exactlyOnce", lambda e: e.info is not None and e.info.exactly_once
)
STREAM = probe("stream", "no streamed response is offered, or no partition is open")
STREAM_BEHIND = probe("stream-behind", "no streamed response with events is offered")
FILTERS = Need(
    "the feed lists no filter", lambda e: any(name.startswith("filter ") for name in e.probes)
)
