"""Everything that a run shows: log records of all loggers, errors with their causes, and more."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from feedapi_client import redact_http_logs
from tests.secrets.echoes import NEEDLES


class Shown:
    """Texts that a user can see, and where."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, str]] = []

    def add(self, where: str, text: str) -> None:
        """Note a text."""
        self.texts.append((where, text))

    def error(self, where: str, error: BaseException) -> None:
        """Note an error as an application logs it: its text, its repr, and the chain of causes."""
        self.add(where, f"{error}\n{error!r}\n{vars(error)}")
        # Without the source lines, which quote the tests.
        for each in _chain(error):
            self.add(f"{where}, {type(each).__name__}", "".join(_lines(each)))

    def leaks(self) -> list[str]:
        """Return where a secret is shown."""
        return sorted(
            {
                f"{where}: {text[:2000]!r}"
                for where, text in self.texts
                if any(needle in text for needle in NEEDLES)
            }
        )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        suppressed = error.__suppress_context__ and error.__cause__ is None
        error = None if suppressed else error.__cause__ or error.__context__


def _lines(error: BaseException) -> list[str]:
    return traceback.format_exception_only(type(error), error)


class _Handler(logging.Handler):
    def __init__(self, shown: Shown) -> None:
        super().__init__(logging.DEBUG)
        self._shown = shown

    def emit(self, record: logging.LogRecord) -> None:
        known = logging.LogRecord("", 0, "", 0, "", (), None).__dict__
        extra = {name: value for name, value in vars(record).items() if name not in known}
        self._shown.add(f"log {record.name}", f"{record.getMessage()} {record.args} {extra}")
        if record.exc_info and record.exc_info[1]:
            self._shown.error(f"log {record.name}", record.exc_info[1])


@contextmanager
def capture() -> Iterator[Shown]:
    """Collect all logs at DEBUG, with httpx's and httpcore's redacted."""
    redact_http_logs()
    shown = Shown()
    handler = _Handler(shown)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield shown
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
