"""Scripts: generators that yield statements and receive the rows found, or their number.

Nothing here knows a database. Parameters are `?`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Named = TypeVar("Named", int, str)

_NAMED_PER_STATEMENT = 490
_CACHED = 64
_QUOTED_OR_PLACEHOLDER = re.compile(r"""\?|"[^"]*"|'[^']*'|`[^`]*`|\[[^\]]*\]""")


class Query(NamedTuple):
    sql: str
    parameters: Sequence[Any] = ()


class CountedChange(NamedTuple):
    sql: str
    parameters: Sequence[Any] = ()


Step = Query | CountedChange
Script = Generator[Any, Any, T]


def in_parts(named: Iterable[Named], size: int = _NAMED_PER_STATEMENT) -> Iterator[list[Named]]:
    """Yield as many identities, or partitions, at a time as one statement names, in their order."""
    ordered = sorted(named)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


@lru_cache(_CACHED)
def with_placeholders(sql: str, style: str) -> str:
    """Replace each `?` by `style` (numbered if it is `$`), but not in quoted names and texts."""
    numbers = count(1)

    def placeholder() -> str:
        return f"${next(numbers)}" if style == "$" else style

    return _QUOTED_OR_PLACEHOLDER.sub(
        lambda found: placeholder() if found[0] == "?" else found[0], sql
    )


async def run_steps_async(script: Script[T], execute: Callable[[Any], Awaitable[Any]]) -> T:
    """An error of a statement is raised within the script."""
    try:
        step = next(script)
        while True:
            try:
                rows = await execute(step)
            except Exception as error:  # noqa: BLE001 - the script cleans up and raises it again
                step = script.throw(error)
            else:
                step = script.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result


def run_steps(script: Script[T], execute: Callable[[Any], Any]) -> T:
    async def answer(step: Any) -> Any:
        return execute(step)

    try:
        run_steps_async(script, answer).send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("nothing is waited for")


def run_on_cursors(
    script: Script[T],
    cursor_of: Callable[[], Any],
    style: str = "?",
) -> T:
    cursor = cursor_of()

    def execute(step: Step) -> Any:
        # Without parameters a % is none of a placeholder.
        given = (step.parameters,) if step.parameters else ()
        cursor.execute(with_placeholders(step.sql, style), *given)
        if isinstance(step, CountedChange):
            return cursor.rowcount
        return cursor.fetchall() if cursor.description else []

    try:
        return run_steps(script, execute)
    finally:
        cursor.close()
