"""A history as data: what a seed generates, and how it is made smaller.

A class whose methods are marked with `step` says what can happen, and a dataclass whose fields are
`drawn` what stays the same meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any, TypeVar

from feedapi_client.testing.simulator.virtual import Backend

Draw = Callable[[Random], Any]
Method = TypeVar("Method", bound=Callable[..., object])

_PAUSES = (0.0, 0.02, 0.02, 0.3, 0.3, 2.0)
_STEPS = 3, 12


def one_of(*values: Any) -> Draw:
    return lambda random: random.choice(values)


def drawn(*choices: Any) -> Any:
    """Return a field of settings, and what is drawn for it."""
    return field(metadata={"choices": choices})


@dataclass(frozen=True, slots=True)
class StepKind:
    """Something that can happen.

    Attributes:
        weight: how often it is drawn, relative to the others.
        share: the part of the histories in which it may happen at all. With all kinds of trouble
            at once, one would hide another.
        draws: draws each argument.
    """

    weight: float
    share: float
    draws: dict[str, Draw]


def step(*, weight: float, share: float = 1.0, **draws: Draw) -> Callable[[Method], Method]:
    """Mark a method as a step of histories: see `StepKind`."""

    def mark(method: Method) -> Method:
        method.__dict__["step"] = StepKind(weight, share, draws)
        return method

    return mark


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happens, `after` some seconds: a method by its name, and its arguments."""

    after: float
    do: str
    how: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.do}({', '.join(f'{name}={value!r}' for name, value in self.how.items())})"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A whole history. `seed` draws what the steps leave open: times, orders, pages."""

    seed: str
    backend: Backend
    settings: Any
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        lines, time = [f"{self.settings}"], 0.0
        for number, each in enumerate(self.steps, 1):
            time += each.after
            lines.append(f"{number:3}. at {time:.3f} s {each}")
        return "\n".join(lines)

    def shrunk(self, fails: Callable[[Scenario], bool]) -> Scenario:
        """Return it without the steps without which `fails` is true, too."""
        for each in self.steps:
            fewer = replace(self, steps=tuple(step for step in self.steps if step is not each))
            if fails(fewer):
                return fewer.shrunk(fails)
        return self


def generate(seed: int, backend: Backend, settings: type[Any], kind: type) -> Scenario:
    """Return the scenario of a seed. Its first step is the first one of `kind`."""
    random = Random(f"scenario {seed}")
    chosen = {each.name: random.choice(each.metadata["choices"]) for each in fields(settings)}
    marked = {name: getattr(method, "step", None) for name, method in vars(kind).items()}
    kinds = {name: found for name, found in marked.items() if isinstance(found, StepKind)}
    there = [name for name, each in kinds.items() if random.random() < each.share]
    weights = [kinds[name].weight for name in there]
    names = [next(iter(kinds)), *random.choices(there, weights, k=random.randint(*_STEPS))]
    steps = tuple(
        Step(
            round(random.choice(_PAUSES) * random.random(), 3) if number else 0.0,
            name,
            {argument: draw(random) for argument, draw in kinds[name].draws.items()},
        )
        for number, name in enumerate(names)
    )
    return Scenario(str(seed), backend, settings(**chosen), steps)
