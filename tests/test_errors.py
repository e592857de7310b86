"""The exception tree."""

from __future__ import annotations

import re

import pytest

from feedapi_client import (
    CommitOrderError,
    FeedError,
    FeedKey,
    MemoryCursorStore,
    StoreError,
    errors,
)
from feedapi_client.quarantine.aside import Aside


def drawn() -> dict[str, str]:
    """The parent of each class, as the module draws the tree."""
    parents, path = {}, list[str]()
    lines = re.findall(r"(?m)^    ([│├└─ ]*)([A-Z]\w+Error)\b", errors.__doc__ or "")
    for indent, name in lines:
        path[len(indent) // 4 :] = [name]
        parents[name] = path[-2] if len(path) > 1 else "Exception"
    return parents


def test_the_tree_is_as_the_module_draws_it() -> None:
    assert drawn() == {
        name: kind.__base__.__name__
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, FeedError) and kind.__base__
    }


def test_r05_a_commit_out_of_order_is_no_failure_of_the_store() -> None:
    """An application that repeats what a store refuses would repeat it for ever."""
    with pytest.raises(FeedError) as caught:
        raise CommitOrderError("a later batch is committed")
    assert not isinstance(caught.value, StoreError)
    aside = Aside("quarantine", FeedKey("http://h/f", "app"), MemoryCursorStore())
    assert not aside.takes(caught.value)
    assert aside.takes(ValueError())
