"""Make a failing scenario smaller, while it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from tests.simulation.manners import Manners
from tests.simulation.scenario import Scenario, Settings

MAX_RUNS = 400
"""Runs after which shrinking ends, whatever could still be left out."""


def shrink(
    scenario: Scenario, fails: Callable[[Scenario], bool], *, max_runs: int = MAX_RUNS
) -> Scenario:
    """Return the smallest scenario found for which `fails` is still true.

    `fails` should be true for the same failure only, so that another one, found on the way, does
    not take its place. Tried are: fewer steps, plainer settings, fewer events, no pauses.
    """
    runs, improved = 0, True
    while improved:
        improved = False
        for other in _smaller(scenario):
            if runs >= max_runs:
                return scenario
            runs += 1
            if fails(other):
                scenario, improved = other, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    yield from _fewer_steps(scenario)
    yield from _plainer_settings(scenario)
    yield from _smaller_steps(scenario)


def _fewer_steps(scenario: Scenario) -> Iterator[Scenario]:
    """Leave out halves, quarters, and so on down to single steps."""
    steps = scenario.steps
    size = len(steps) // 2
    while size:
        for start in range(0, len(steps), size):
            yield replace(scenario, steps=steps[:start] + steps[start + size :])
        size //= 2


def _plainer_settings(scenario: Scenario) -> Iterator[Scenario]:
    plain, settings = Settings(), scenario.settings
    for field in fields(Settings):
        default = getattr(plain, field.name)
        if getattr(settings, field.name) != default:
            yield replace(scenario, settings=replace(settings, **{field.name: default}))
    kind, manners = Manners(), settings.manners
    for each in fields(Manners):
        default = getattr(kind, each.name)
        if getattr(manners, each.name) != default:
            better = replace(manners, **{each.name: default})
            yield replace(scenario, settings=replace(settings, manners=better))


def _smaller_steps(scenario: Scenario) -> Iterator[Scenario]:
    for number, step in enumerate(scenario.steps):
        candidates = [replace(step, after=0.0)] if step.after else []
        count = step.how.get("count", 1)
        if count > 1:
            candidates += [
                replace(step, how={**step.how, "count": fewer})
                for fewer in sorted({1, count // 2, count - 1})
            ]
        for smaller in candidates:
            steps = (*scenario.steps[:number], smaller, *scenario.steps[number + 1 :])
            yield replace(scenario, steps=steps)
