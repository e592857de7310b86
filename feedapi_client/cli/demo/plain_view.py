"""Show the demo as lines of text."""

from __future__ import annotations

from typing import Self

from feedapi_client.cli.common.escape import one_line
from feedapi_client.cli.demo.proof import Verdict, conclusion
from feedapi_client.cli.demo.scenario import Scenario


class PlainView:
    """Prints a line for each entry of the log."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        scenario.log.on_entry = self._print

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._scenario.log.on_entry = None

    def conclude(self, verdict: Verdict) -> None:
        """Print the result."""
        consumer = self._scenario.consumer
        self._print(self._scenario.log.elapsed, f"{consumer.applied:,} events applied")
        for line in conclusion(verdict, consumer.crashes, self._scenario.instances):
            print(line)

    def _print(self, at: float, text: str) -> None:
        print(f"{at:6.2f} s  {one_line(text)}", flush=True)
