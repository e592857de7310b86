"""Escape text from elsewhere before a terminal shows it."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Return the text on one line, without any character that a terminal would act upon."""
    return "".join(
        char if char.isprintable() else " " if char.isspace() else f"\\x{ord(char):02x}"
        for char in " ".join(text.split())
    )
