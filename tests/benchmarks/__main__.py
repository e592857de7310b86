"""What has a bar, side by side: ``python -m tests.benchmarks``, on an otherwise idle machine.

Prints one table, and writes it to ``build/benchmarks`` as JSON with every round and a description
of the machine, and as charts. ``--only NAME`` measures one part, and may be given several times;
``--quick`` shows in seconds that everything runs: its figures say nothing.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from rich.console import Console

from tests.benchmarks.charts import draw_ratios
from tests.benchmarks.results import Comparison, table, write_json
from tests.benchmarks.sizes import Sizes

PARTS = {
    "consume": "bench_consume",
    "by-key": "bench_by_key",
    "observe": "bench_observe",
    "pages": "bench_pages",
    "latency": "bench_latency",
    "startup": "bench_startup",
    "exactly-once": "bench_exactly_once",
    "relay": "bench_relay",
    "clients": "bench_clients",
    "idle": "bench_idle",
    "polls": "bench_scale",
}
"""The modules by name. The longest is last: results are written after each part."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/benchmarks"))
    parser.add_argument(
        "--only", action="append", choices=PARTS, metavar="NAME", help=str([*PARTS])
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--postgres", metavar="URL", help="of SQLAlchemy; without it one is started"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    sizes = Sizes(
        rounds=1 if options.quick else options.rounds,
        quick=options.quick,
        folder=options.output,
        postgres=options.postgres,
    )
    results: list[Comparison] = []
    for name in options.only or PARTS:
        results += import_module(f"tests.benchmarks.{PARTS[name]}").measure(sizes)
        write_json(results, options.output / "results.json")
        draw_ratios(results, options.output / "ratios.svg")
    Console().print(table(results))


if __name__ == "__main__":
    main()
