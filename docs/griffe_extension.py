"""Griffe extension: show the literal blocks of docstrings as Markdown does.

The docstrings are read in terminals and editors, where reStructuredText's ``::`` before an indented
block is familiar. Markdown needs no mark there and would print it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_LONE_MARK = re.compile(r"^::\n", re.MULTILINE)
_TRAILING_MARK = re.compile(r"(?<=\S)::$", re.MULTILINE)


class LiteralBlocks(griffe.Extension):
    """Remove ``::`` before indented blocks."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that was loaded."""
        if obj.docstring is not None:
            text = _LONE_MARK.sub("\n", obj.docstring.value)
            obj.docstring.value = _TRAILING_MARK.sub(":", text)
