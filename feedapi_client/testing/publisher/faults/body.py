"""What faults do with the body of a response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from feedapi_client.testing.publisher.responses import Response


def without_stream(response: Response) -> Response:
    """Return the response with the first lines of its stream as its whole body."""
    if response.stream is not None:
        response.body += response.stream.next_lines()[0]
        response.stream = None
    return response


def parse_lines(body: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Give each line, with its line end, and the object that it holds."""
    for line in body.split(b"\n")[:-1]:
        yield line + b"\n", orjson.loads(line)


def cut(body: bytes, after_bytes: int | None, after_lines: int | None) -> bytes:
    """Return the start of a body.

    It ends after a number of bytes, or in the middle of the line after a number of whole lines.
    Without either it ends in the middle of the last line.
    """
    if after_bytes is not None:
        return body[:after_bytes]
    lines = body.split(b"\n")[:-1]
    if not lines:
        return body
    kept = len(lines) - 1 if after_lines is None else min(after_lines, len(lines) - 1)
    half_line = lines[kept][: max(1, len(lines[kept]) // 2)]
    return b"".join(line + b"\n" for line in lines[:kept]) + half_line
