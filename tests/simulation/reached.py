"""``python -m tests.simulation.reached``: which actions of the planner are reached.

::

    python -m tests.simulation.reached --seeds 500                     # one instance
    python -m tests.simulation.reached --seeds 500 --instances 2..4

It prints a table in Markdown: for each state of a partition how often a simulation has carried out
each action in it. Below come the legal moves between states that none of the seeds has made.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from feedapi_client.lineage import planner
from feedapi_client.lineage.states import (
    TRANSITIONS,
    Action,
    Drained,
    Entry,
    Fail,
    Rediscover,
    Report,
    Save,
    Start,
    State,
    Stop,
)
from feedapi_client.runtime.planning import Planning
from tests.simulation.__main__ import numbers
from tests.simulation.many import Histories
from tests.simulation.simulation import run

ACTIONS = (Start, Stop, Save, Drained, Report, Fail, Rediscover)
_NO_STATE = "no partition"


class Reached:
    """What simulations have reached: moves between states, and actions by state."""

    def __init__(self) -> None:
        self.moves: Counter[tuple[State, State]] = Counter()
        self.actions: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is reached in the block."""
        move, perform = planner.move_entry, Planning.perform
        reached = self

        def counting_move(entry: Entry, state: State) -> None:
            reached.moves[entry.state, state] += 1
            move(entry, state)

        def counting_perform(self: Planning, actions: Any) -> None:
            taken = list(actions)
            for action in taken:
                reached.act(self, action)
            perform(self, taken)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planner, "move_entry", counting_move)
            patch.setattr(Planning, "perform", counting_perform)
            yield

    def act(self, planning: Planning, action: Action) -> None:
        """Count an action, in the state that its partitions have."""
        name = type(action).__name__
        ids = action.positions if isinstance(action, Save) else [getattr(action, "partition", None)]
        for id in ids:
            entry = None if id is None else planning.planner.entries.get(id)
            self.actions[_NO_STATE if entry is None else entry.state.value, name] += 1

    @property
    def missed(self) -> list[str]:
        """The legal moves that were never made."""
        return [
            f"{source} to {target}: {cause}"
            for source, target, cause, _ in TRANSITIONS
            if not self.moves[source, target]
        ]

    def table(self) -> str:
        """Return the actions by state, in Markdown."""
        names = [kind.__name__ for kind in ACTIONS]
        lines = [f"| state | {' | '.join(names)} |", f"|---|{'--:|' * len(names)}"]
        for state in [*(state.value for state in State), _NO_STATE]:
            counts = [str(self.actions[state, name] or "-") for name in names]
            lines.append(f"| {state} | {' | '.join(counts)} |")
        return "\n".join(lines)


def reach(seeds: range, instances: tuple[int, ...] = ()) -> Reached:
    """Run seeds, and return what they have reached."""
    reached, histories = Reached(), Histories(instances=instances)
    with reached.counted():
        for seed in seeds:
            run(histories.of(seed))
    return reached


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.reached")
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--instances", type=numbers, default=())
    options = parser.parse_args(arguments)
    reached = reach(range(options.seeds), options.instances)
    print(reached.table())
    made = len(TRANSITIONS) - len(reached.missed)
    print(f"\n{made} of {len(TRANSITIONS)} legal moves were made. Never made:")
    print("\n".join(f"- {text}" for text in reached.missed) or "- none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
