"""Scripts: what happens in a transaction, written once for each kind of connection.

A script is a generator that yields statements and receives the rows found. Nothing here knows a
database: who runs a script gives the function that executes a statement.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Query(NamedTuple):
    """A statement and its parameters."""

    sql: str
    parameters: Sequence[Any] = ()


class StatementRows(NamedTuple):
    """A statement and the rows to execute it for."""

    sql: str
    rows: list[tuple[Any, ...]]


Step = Query | StatementRows
Script = Generator[Step, list[Any], T]


def run_steps(script: Script[T], execute: Callable[[Any], list[Any]]) -> T:
    """Run a script, and return its result. An error of a statement is raised within the script."""
    try:
        step = next(script)
        while True:
            try:
                rows = execute(step)
            except Exception as error:  # noqa: BLE001 - the script cleans up and raises it again
                step = script.throw(error)
            else:
                step = script.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result


async def run_steps_async(script: Script[T], execute: Callable[[Any], Awaitable[list[Any]]]) -> T:
    """Do as `run_steps`, with an asynchronous function."""
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
