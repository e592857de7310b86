"""A progress bar for long runs: on a terminal, and if rich is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(doing: str, total: int) -> Iterator[Callable[[], object]]:
    """Show how far a loop of `total` rounds is. Gives a function to be called after each round."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    try:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
    except ImportError:
        yield lambda: None
        return
    # rich takes what is printed to stdout into the console, which is stderr: not from a file.
    redirect = sys.stdout.isatty()
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=redirect
    ) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda: bar.advance(task)
