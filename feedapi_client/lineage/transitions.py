"""The states of a partition and the legal transitions between them, as data.

The planner checks every change of state against `TRANSITIONS`. The documentation renders the same
tables with `markdown()` and `diagram()`, so that what is drawn is what is enforced.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """The state of a partition in the planner. Every partition begins as `WAITING`."""

    WAITING = "waiting"
    READING = "reading"
    CAUGHT_UP = "caught up"
    DRAINED = "drained"
    SUPERSEDED = "superseded"
    VANISHED = "vanished"
    PARKED = "parked"
    ELSEWHERE = "elsewhere"


MEANINGS: dict[State, str] = {
    State.WAITING: "known but not started: another partition comes first, "
    "or no discovery has listed it yet",
    State.READING: "being fetched, or due to be fetched",
    State.CAUGHT_UP: "open, and read to its present end",
    State.DRAINED: "closed, read to its end, and the end is committed",
    State.SUPERSEDED: "its cursor was transferred to its successors",
    State.VANISHED: "no longer listed",
    State.PARKED: "stopped by an error of its own, or of a partition that it descends from",
    State.ELSEWHERE: "could be read, but this instance has no lease of it (`share`)",
}
"""What each state means."""


class Transition(NamedTuple):
    """One legal change of a partition's state.

    `cause` says in a few words what makes it happen, `rules` which rules of consumption demand it.
    """

    source: State
    target: State
    cause: str
    rules: tuple[str, ...]


TRANSITIONS: tuple[Transition, ...] = (
    Transition(
        State.WAITING,
        State.READING,
        "listed, and every partition it waits for is drained",
        ("R4", "R8"),
    ),
    Transition(
        State.WAITING,
        State.DRAINED,
        "stored as drained, or closed at a first start at the end",
        ("R6", "R7"),
    ),
    Transition(
        State.WAITING,
        State.SUPERSEDED,
        "stored as superseded, or its cursor is transferred before it was started",
        ("R7", "R9"),
    ),
    Transition(
        State.WAITING,
        State.VANISHED,
        "no longer listed",
        ("R11",),
    ),
    Transition(
        State.WAITING,
        State.PARKED,
        "a partition it descends from is parked, or its lineage is lost or ambiguous",
        ("R8", "R9", "R18"),
    ),
    Transition(
        State.READING,
        State.CAUGHT_UP,
        "open, and a complete response held no event and no new cursor",
        ("R6", "R15"),
    ),
    Transition(
        State.READING,
        State.DRAINED,
        "closed, and the committed cursor is its end",
        ("R6",),
    ),
    Transition(
        State.READING,
        State.SUPERSEDED,
        "its cursor is transferred to its successors",
        ("R9",),
    ),
    Transition(
        State.READING,
        State.VANISHED,
        "no longer listed",
        ("R11",),
    ),
    Transition(
        State.READING,
        State.PARKED,
        "an error that no retry mends",
        ("R18",),
    ),
    Transition(
        State.CAUGHT_UP,
        State.READING,
        "the next event came, or it was closed and its end is asked for once more",
        ("R6", "R15"),
    ),
    Transition(
        State.CAUGHT_UP,
        State.DRAINED,
        "closed, and the committed cursor is its end",
        ("R6",),
    ),
    Transition(
        State.CAUGHT_UP,
        State.SUPERSEDED,
        "its cursor is transferred to its successors",
        ("R9",),
    ),
    Transition(
        State.CAUGHT_UP,
        State.VANISHED,
        "no longer listed",
        ("R11",),
    ),
    Transition(
        State.CAUGHT_UP,
        State.PARKED,
        "an error that no retry mends",
        ("R18",),
    ),
    Transition(
        State.DRAINED,
        State.READING,
        "listed as open again, or an event came late behind the end that empty answers showed",
        ("R6",),
    ),
    Transition(
        State.DRAINED,
        State.WAITING,
        "listed as open again, and its parent is not drained any more",
        ("R4", "R8"),
    ),
    Transition(
        State.DRAINED,
        State.SUPERSEDED,
        "its cursor is transferred to its successors",
        ("R9",),
    ),
    Transition(
        State.VANISHED,
        State.READING,
        "listed again",
        ("R11",),
    ),
    Transition(
        State.VANISHED,
        State.WAITING,
        "listed again, and it has to wait for another partition",
        ("R8", "R11"),
    ),
    Transition(
        State.VANISHED,
        State.SUPERSEDED,
        "its cursor is transferred to its successors",
        ("R9",),
    ),
    Transition(
        State.VANISHED,
        State.PARKED,
        "an error that no retry mends, or its lineage is lost or ambiguous",
        ("R8", "R9", "R18"),
    ),
    Transition(
        State.VANISHED,
        State.DRAINED,
        "stored as drained by another instance",
        ("R6",),
    ),
    Transition(
        State.WAITING,
        State.ELSEWHERE,
        "could be read, and this instance has no lease of it",
        ("R17",),
    ),
    Transition(
        State.READING,
        State.ELSEWHERE,
        "its lease is given away or lost",
        ("R17",),
    ),
    Transition(
        State.CAUGHT_UP,
        State.ELSEWHERE,
        "its lease is given away or lost",
        ("R17",),
    ),
    Transition(
        State.DRAINED,
        State.ELSEWHERE,
        "listed as open again, an event came late, or another instance had changed it when its end "
        "was saved",
        ("R6", "R17"),
    ),
    Transition(
        State.SUPERSEDED,
        State.WAITING,
        "its cursor was moved back to an ancestor, which is split again",
        ("R9", "R11"),
    ),
    Transition(
        State.SUPERSEDED,
        State.ELSEWHERE,
        "another instance had changed it when its cursor was transferred",
        ("R9", "R17"),
    ),
    Transition(
        State.VANISHED,
        State.ELSEWHERE,
        "listed again, and this instance has no lease of it",
        ("R11", "R17"),
    ),
    Transition(
        State.ELSEWHERE,
        State.READING,
        "its lease was claimed, and its position read from the store",
        ("R17",),
    ),
    Transition(
        State.ELSEWHERE,
        State.WAITING,
        "it has to wait for another partition",
        ("R4", "R8"),
    ),
    Transition(
        State.ELSEWHERE,
        State.DRAINED,
        "stored as drained by another instance",
        ("R6",),
    ),
    Transition(
        State.ELSEWHERE,
        State.SUPERSEDED,
        "its cursor is transferred to its successors, by whichever instance",
        ("R9",),
    ),
    Transition(
        State.ELSEWHERE,
        State.VANISHED,
        "no longer listed",
        ("R11",),
    ),
    Transition(
        State.ELSEWHERE,
        State.PARKED,
        "a partition it descends from is parked, or its lineage is lost or ambiguous",
        ("R8", "R9", "R18"),
    ),
)
"""Every legal transition, once for each pair of states. `PARKED` is final: a parked
partition is tried again only by the next session, which starts from the store. `SUPERSEDED` is,
once the store has it, unless an operator moves the cursor back (`feedapi cursors restore`)."""

_LEGAL = frozenset((transition.source, transition.target) for transition in TRANSITIONS)


class IllegalTransitionError(RuntimeError):
    """The planner tried a transition that is not in `TRANSITIONS`: a defect of this library.

    Deliberately not a `FeedError`: no retry and no parking may hide it.
    """

    def __init__(self, partition: int, source: State, target: State) -> None:
        super().__init__(
            f"internal error: partition {partition} must not go from {source.value!r} "
            f"to {target.value!r}. Please report it"
        )
        self.partition = partition
        self.source = source
        self.target = target

    def __reduce__(self) -> tuple[type[IllegalTransitionError], tuple[int, State, State]]:
        return (type(self), (self.partition, self.source, self.target))


def check_transition(partition: int, source: State, target: State) -> None:
    """Raise `IllegalTransitionError` unless the change of state is listed in `TRANSITIONS`."""
    if (source, target) not in _LEGAL:
        raise IllegalTransitionError(partition, source, target)


def markdown() -> str:
    """Return the states and the transitions as two Markdown tables."""
    states = _table(
        ("State", "Means"),
        [(f"`{state.value}`", meaning) for state, meaning in MEANINGS.items()],
    )
    transitions = _table(
        ("From", "To", "When", "Rules"),
        [
            (f"`{source.value}`", f"`{target.value}`", cause, ", ".join(rules))
            for source, target, cause, rules in TRANSITIONS
        ],
    )
    return f"{states}\n{transitions}"


def diagram() -> str:
    """Return the transitions as the source of a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.WAITING.name}"]
    lines += [f'    state "{state.value}" as {state.name}' for state in State]
    lines += [f"    {source.name} --> {target.name}" for source, target, _, _ in TRANSITIONS]
    final = set(State) - {transition.source for transition in TRANSITIONS}
    lines += [f"    {state.name} --> [*]" for state in State if state in final]
    return "\n".join(lines) + "\n"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
