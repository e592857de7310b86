"""The fault matrix: all faults with their outcomes, and its page in the documentation.

``python -m tests.faults.matrix`` writes the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.faults.bombs import BOMBS
from tests.faults.discoveries import DISCOVERIES
from tests.faults.faults import CONNECTION, CONTENT, FRAMING, TIMING
from tests.faults.outcomes import Fault
from tests.faults.statuses import REDIRECTS, RETRY_AFTER, STATUSES

FAULTS: tuple[Fault, ...] = (
    *CONNECTION,
    *TIMING,
    *FRAMING,
    *CONTENT,
    *STATUSES,
    *REDIRECTS,
    *RETRY_AFTER,
)
_COLUMNS = (
    "fault",
    "first discovery",
    "later discovery",
    "fetch",
    "fetch from `_last`",
    "one call of a client",
    "rules",
)


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _shown(outcome: str) -> str:
    return f"`{outcome}`" if outcome.endswith("Error") else outcome


def _escaped(text: str) -> str:
    return text.replace("|", "\\|") or "(empty)"


def _row(fault: Fault) -> tuple[str, ...]:
    outcomes = fault.outcomes
    said = (outcomes.entry, outcomes.running, outcomes.fetch, outcomes.last, outcomes.call)
    rules = ", ".join(f"[R{number}](rules.md#r{number})" for number in outcomes.rules)
    return (_escaped(fault.name), *map(_shown, said), rules)


PAGE = Path(__file__).parents[2] / "docs" / "pages" / "faults.md"
HELD = Path(__file__).parent / "held.md"
"""A table that ``python -m tests.benchmarks.bench_hostile`` writes."""
_HELD = """## Nonsense

What one response brings is decoded in parts of at most 64 KiB and 1,024 lines, with other tasks in
between. A response may hold 524,288 lines that say nothing, and 16 more for each line that is an
event or a checkpoint and for each piece in which it comes: heartbeats of a stream are never too
many. Then it is a `TornResponseError` like any other. Neither blank lines nor the cursor asked with
count.

The longest time that a task waited for its turn (beside `SyncFeedConsumer`: a thread), in
milliseconds of CPU, while responses of 4 MiB of such lines came as gzip, measured on two cores that
were busy with other work. A task waits for a part of each response that is there, so that it waits
longer beside more of them. A line of several megabytes is decoded at once, and so is a discovery:
with 32,768 partitions, which are as many as there can be, it and the planning of them hold other
tasks up for up to a second, at most once in `Limits.discovery_interval`:

"""
_INTRODUCTION = """# What a fault comes to

Each row is a fault that the tests in `tests/faults/` produce over real sockets. This page is
rendered from the table that they run, by `python -m tests.faults.matrix`.

- *delivered*: the consumer goes on by itself. Once the fault has passed, every event is delivered,
  once.
- The name of an [error](errors.md): the consumer ends with it, after a bounded number of requests.
  *First discovery* is what entering the consumer raises, *later discovery* is a running one, and
  *fetch* is what the iteration raises with `on_error="raise"`.
- *One call of a client* is `FeedClient.fetch` or `SyncFeedClient.fetch`, which do not retry. *page*
  means that the call returns.

A fault that does not pass is raised after `RetryPolicy.give_up_after`, or after
`RetryPolicy.refused_for` where the publisher refuses requests.
"""


def markdown() -> str:
    """Return the page: an introduction, and a section for each group of faults."""
    parts = [_INTRODUCTION]
    shown = (*FAULTS, *BOMBS)
    for group in dict.fromkeys(fault.group for fault in shown):
        rows = [_row(fault) for fault in shown if fault.group == group]
        parts.append(f"## {group[0].upper()}{group[1:]}\n\n{_table(_COLUMNS, rows)}")
    discoveries = [(_escaped(name), _shown(kind)) for name, (_, kind) in DISCOVERIES.items()]
    parts.append(
        "## Discoveries\n\nA running consumer keeps its last good topology and tries again (R12).\n"
        "\n" + _table(("discovery", "on entry"), discoveries)
    )
    parts.append(_HELD + HELD.read_text(encoding="utf-8"))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
