"""Cut bytes into chunks, at places that the input itself chooses."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random


def cut(data: bytes, seed: int) -> Iterator[bytes]:
    """Yield `data` in chunks of 1 to 16 bytes (large input: up to a quarter of it)."""
    random = Random(seed)
    longest = max(16, len(data) // 4)
    start = 0
    while start < len(data):
        end = start + random.randint(1, longest)
        yield data[start:end]
        start = end
