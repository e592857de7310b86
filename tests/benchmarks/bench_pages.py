"""Pages in gzip, small and large events and pages, beside bare loops."""

from __future__ import annotations

from dataclasses import dataclass

from tests.benchmarks.results import Comparison, in_turns
from tests.benchmarks.sizes import Sizes
from tests.benchmarks.static_feed import Encoding, static_feed


@dataclass(frozen=True)
class Shape:
    """A feed."""

    name: str
    events: int
    page_size: int
    line_bytes: int | None = None
    encoding: Encoding | None = None


SHAPES = (
    Shape("pages in gzip", 400_000, 20_000, encoding="gzip"),
    Shape("events of 60 bytes", 600_000, 20_000, line_bytes=60),
    Shape("events of 1 KiB", 100_000, 4000, line_bytes=1024),
    Shape("events of 64 KiB", 2000, 50, line_bytes=64 * 1024),
    Shape("events of 1 MB", 200, 5, line_bytes=1_000_000),
    Shape("pages of 1 event", 3000, 1),
    Shape("pages of 100 events", 100_000, 100),
    Shape("pages of 100,000 events", 600_000, 100_000),
)


def measure(sizes: Sizes) -> list[Comparison]:
    """Time `batches()` with each `.raw` on feeds of several shapes, in events per second."""
    results = []
    for shape in SHAPES:
        events = min(shape.events, 3 * min(shape.page_size, 200)) if sizes.quick else shape.events
        with static_feed(
            events=events,
            page_size=shape.page_size,
            line_bytes=shape.line_bytes,
            encoding=shape.encoding,
            in_thread=sizes.quick,
        ) as url:
            pairs = in_turns(
                sizes.speed_of("batches_raw", url),
                sizes.speed_of("bare_raw", url),
                rounds=sizes.rounds,
                title=shape.name,
            )
        results.append(
            Comparison(
                name=f"{shape.name}, .raw / httpx + decode_lines",
                unit="k events/s",
                ours=[each.wall / 1e3 for each, _ in pairs],
                theirs=[each.wall / 1e3 for _, each in pairs],
            )
        )
    return results
