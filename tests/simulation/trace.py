"""The record of one run: what happened when, in virtual time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable


class Trace:
    """Lines of text with their virtual time. Two runs of one seed write the same lines."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._lines: list[tuple[float, str, tuple[object, ...]]] = []

    def add(self, text: str, *values: object) -> None:
        """Record `text.format(*values)` at the present time. Formatting is left for later."""
        self._lines.append((self.now(), text, values))

    def __len__(self) -> int:
        return len(self._lines)

    def texts(self) -> list[str]:
        """Return everything that was recorded, without its time."""
        return [text.format(*values) for _, text, values in self._lines]

    def lines(self) -> list[str]:
        """Return everything that was recorded."""
        return [f"{time:10.4f}  {text.format(*values)}" for time, text, values in self._lines]

    def digest(self) -> str:
        """Return a digest of all lines, to compare two runs."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()[:16]
