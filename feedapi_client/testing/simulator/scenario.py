"""A history as data: what a seed generates, what is told of it, and how it is made smaller.

A class whose methods are marked with `step` says what can happen, and a dataclass whose fields are
`drawn` what stays the same meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any, TypeVar

from feedapi_client.testing.simulator.virtual import Backend

Draw = Callable[[Random], Any]
Method = TypeVar("Method", bound=Callable[..., object])
Shrunk = TypeVar("Shrunk")

_PAUSES = (0.0, 0.02, 0.02, 0.3, 0.3, 2.0)
_STEPS = 3, 12


def one_of(*values: Any) -> Draw:
    """Return what draws one of the values."""
    return lambda random: random.choice(values)


def drawn(plain: Any, *choices: Any) -> Any:
    """Return a field of settings: its value in the plain history, and what is drawn in others."""
    return field(default=plain, metadata={"choices": choices})


class Count(int):
    """A number that is told as ``{count:event is|events are}``: with what there is one of."""

    def __format__(self, words: str) -> str:
        one, _, many = words.partition("|")
        return f"{int(self)} {one if self == 1 else many}" if words else str(int(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKind:
    """Something that can happen.

    Attributes:
        text: tells it: a format of the arguments.
        weight: how often it is drawn, relative to the others.
        share: the part of the histories in which it may happen at all. With all kinds of trouble
            at once, one would hide another.
        words: how values of arguments are told that are no words.
        draws: draws each argument.
    """

    text: str
    weight: float
    share: float
    words: Mapping[Any, str]
    draws: dict[str, Draw]

    def tell(self, how: Mapping[str, Any]) -> str:
        """Return what happens with these arguments, in words."""
        told = {name: self.words.get(value, value) for name, value in how.items()}
        counted = {k: Count(v) if isinstance(v, int) else v for k, v in told.items()}
        return self.text.format(**counted)


def step(
    text: str,
    *,
    weight: float,
    share: float = 1.0,
    words: Mapping[Any, str] | None = None,
    **draws: Draw,
) -> Callable[[Method], Method]:
    """Mark a method as a step of histories: see `StepKind`."""
    kind = StepKind(text=text, weight=weight, share=share, words=words or {}, draws=draws)

    def mark(method: Method) -> Method:
        method.__dict__["step"] = kind
        return method

    return mark


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happens, some seconds after the step before it.

    Attributes:
        after: seconds since the step before.
        do: the name of a method.
        how: its arguments.
    """

    after: float
    do: str
    how: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A whole history. `seed` draws what the steps leave open: times, orders, pages.

    Attributes:
        settings: what stays the same, an instance of a dataclass of `drawn` fields.
        kind: the class whose methods the steps are.
    """

    seed: str
    backend: Backend
    settings: Any
    steps: tuple[Step, ...]
    kind: type

    def __str__(self) -> str:
        """Return the settings that are not the plain ones and the steps: a line each."""
        given = [f"{name}={value!r}" for name, value, plain in _settings(self) if value != plain]
        lines, time = [f"settings: {', '.join(given) or 'the defaults'}"], 0.0
        for number, each in enumerate(self.steps, 1):
            time += each.after
            lines.append(f"{number:3}. at {time:.3f} s {self.tell(each)}")
        return "\n".join(lines)

    def tell(self, each: Step) -> str:
        """Return what happens in a step, in words."""
        return _kinds(self.kind)[each.do].tell(each.how)


def _kinds(kind: type) -> dict[str, StepKind]:
    marked = {name: getattr(method, "step", None) for name, method in vars(kind).items()}
    return {name: found for name, found in marked.items() if isinstance(found, StepKind)}


def _settings(scenario: Scenario) -> Iterator[tuple[str, Any, Any]]:
    for each in fields(scenario.settings):
        yield each.name, getattr(scenario.settings, each.name), each.default


def generate(seed: int, backend: Backend, settings: type[Any], kind: type) -> Scenario:
    """Return the scenario of a seed. Its first step is the first one of `kind`."""
    random = Random(f"scenario {seed}")
    chosen = {
        each.name: random.choice(each.metadata["choices"] or (each.default,))
        for each in fields(settings)
    }
    kinds = _kinds(kind)
    first = next(iter(kinds))
    there = [name for name, each in kinds.items() if random.random() < each.share]
    weights = [kinds[name].weight for name in there]
    names = [first, *random.choices(there, weights, k=random.randint(*_STEPS))]
    steps = tuple(
        Step(
            round(random.choice(_PAUSES) * random.random(), 3) if number else 0.0,
            name,
            {argument: draw(random) for argument, draw in kinds[name].draws.items()},
        )
        for number, name in enumerate(names)
    )
    return Scenario(str(seed), backend, settings(**chosen), steps, kind)


# ---------------------------------------------------------------------- shrinking


def shrink(
    scenario: Shrunk,
    fails: Callable[[Shrunk], bool],
    *,
    smaller: Callable[[Shrunk], Iterable[Shrunk]],
    max_runs: int,
) -> Shrunk:
    """Return the smallest scenario found for which `fails` is still true.

    `fails` should be true for the same failure only, so that another one, found on the way, does
    not take its place. `smaller` gives what is tried in place of a scenario, in this order.
    """
    runs, improved = 0, True
    while improved:
        improved = False
        for other in smaller(scenario):
            if runs >= max_runs:
                return scenario
            runs += 1
            if fails(other):
                scenario, improved = other, True
                break
    return scenario


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the scenario with plain settings, with fewer steps, plainer settings, smaller steps."""
    plain = {name: value for name, given, value in _settings(scenario) if given != value}
    if len(plain) > 1:
        yield replace(scenario, settings=replace(scenario.settings, **plain))
    steps = scenario.steps
    size = len(steps) // 2
    while size:  # leave out halves, quarters, and so on down to single steps
        for start in range(0, len(steps), size):
            yield replace(scenario, steps=steps[:start] + steps[start + size :])
        size //= 2
    for name, value in plain.items():
        yield replace(scenario, settings=replace(scenario.settings, **{name: value}))
    for number, each in enumerate(steps):
        count = each.how.get("count", 1)
        fewer = sorted({1, count // 2, count - 1} - {0, count})
        less = [replace(each, how={**each.how, "count": count}) for count in fewer]
        for other in [replace(each, after=0.0), *less] if each.after else less:
            yield replace(scenario, steps=(*steps[:number], other, *steps[number + 1 :]))
