"""The order in which trio runs tasks, made the same for each run."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

T = TypeVar("T")


def has_one_order() -> bool:
    """Return whether two runs on trio are the same: whether Hypothesis is installed."""
    return find_spec("hypothesis") is not None


def in_one_order(program: Callable[[], T]) -> T:
    """Return what `program()` returns, which runs tasks on trio in the same order each time.

    trio draws that order and offers no seed for it. But it gives its random numbers to Hypothesis,
    by a plugin of its own, and Hypothesis seeds all that it was given around each example. So the
    program runs as the only example of a test. Without Hypothesis two runs can differ.

    Raises what `program` raises.
    """
    try:
        from hypothesis import Phase, currently_in_test_context, given, settings
        from hypothesis.strategies import none
    except ImportError:
        return program()
    if currently_in_test_context():
        return program()  # the caller's own test: the numbers are seeded already
    results: list[T] = []
    errors: list[BaseException] = []

    @settings(max_examples=1, phases=[Phase.generate], database=None, deadline=None)
    @given(none())
    def example(_: None) -> None:
        try:
            results.append(program())
        except BaseException as error:
            errors.append(error)

    example()
    if errors:
        raise errors[0]
    return results[0]
