"""The fault matrix: all faults with their outcomes, and its page in the documentation.

``python -m tests.faults.matrix`` writes the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.faults.bombs import BOMBS
from tests.faults.discoveries import DISCOVERIES
from tests.faults.faults import CONNECTION, CONTENT, FRAMING, TIMING
from tests.faults.outcomes import Fault, Outcomes
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
    "faults",
    "first discovery",
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


def _rows(faults: Sequence[Fault]) -> list[tuple[str, ...]]:
    """Return one row for each outcome, with the names of all faults that come to it."""
    return [
        (_joined(fault.name for fault in faults if fault.outcomes == outcomes), *_said(outcomes))
        for outcomes in dict.fromkeys(fault.outcomes for fault in faults)
    ]


def _joined(names: Iterable[str]) -> str:
    return "; ".join(map(_escaped, names))


def _said(outcomes: Outcomes) -> tuple[str, ...]:
    said = (outcomes.entry, outcomes.fetch, outcomes.last, outcomes.call)
    rules = ", ".join(f"[R{number}](rules.md#r{number})" for number in outcomes.rules)
    return (*map(_shown, said), rules)


def _longest(held: str) -> list[tuple[str, ...]]:
    """Return the longest time of each face and number of partitions, of any lines and dialect."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in held.splitlines()[2:]]
    faces = dict.fromkeys(row[2] for row in rows)
    times = {face: [map(int, row[3:]) for row in rows if row[2] == face] for face in faces}
    return [
        (face, *(str(max(column)) for column in zip(*times[face], strict=True))) for face in faces
    ]


PAGE = Path(__file__).parents[2] / "docs" / "pages" / "faults.md"
HELD = Path(__file__).parent / "held.md"
"""A table that ``python -m tests.benchmarks.bench_hostile`` writes."""
_HELD = """## Nonsense

What one response brings is decoded in parts of at most 64 KiB and 1,024 lines, with other tasks in
between. A response may hold 524,288 lines that say nothing, and 16 more for each line that is an
event or a checkpoint and for each piece in which it comes: heartbeats of a stream are never too
many. Then it is a `TornResponseError`. Neither blank lines nor the cursor asked with count. Of
several responses one part is decoded in a turn of the event loop.

Two things are done at once. A line is decoded in one call: a megabyte that is nothing but keys
takes up to 30 ms, and `Limits.max_line_bytes` is the bound. A discovery is read in a thread and
planned at once: that of 32,768 partitions takes 0.4 to 0.6 s, at most once in
`Limits.discovery_interval`.

The longest time that a task (beside `SyncFeedConsumer`: a thread) waited for its turn, in
milliseconds of CPU on two busy cores, while responses of 4 MiB of such lines came as gzip; the
times for each kind of line are in `tests/faults/held.md`:

"""
_INTRODUCTION = """# What a fault comes to

The tests in `tests/faults/` produce these faults over real sockets. Faults that come to the same
share a row. This page is rendered from the table that the tests run, by `python -m
tests.faults.matrix`.

- *delivered*: the consumer goes on by itself. Once the fault has passed, every event is delivered,
  once. So does a running consumer whose later discovery meets any of these faults.
- The name of an [error](errors.md): the consumer ends with it, after a bounded number of requests.
  *First discovery* is what entering the consumer raises, and *fetch* is what the iteration raises
  with `on_error="raise"`.
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
        rows = _rows([fault for fault in shown if fault.group == group])
        parts.append(f"## {group[0].upper()}{group[1:]}\n\n{_table(_COLUMNS, rows)}")
    kinds = dict.fromkeys(kind for _, kind in DISCOVERIES.values())
    discoveries = [
        (_joined(name for name, (_, each) in DISCOVERIES.items() if each == kind), _shown(kind))
        for kind in kinds
    ]
    parts.append(
        "## Discoveries\n\nA running consumer keeps its last good topology and tries again (R12).\n"
        "\n" + _table(("discoveries", "on entry"), discoveries)
    )
    held = _longest(HELD.read_text(encoding="utf-8"))
    parts.append(_HELD + _table(("face", "1 partition", "16", "64"), held))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
