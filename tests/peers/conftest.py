from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.peers.go_publisher import GoPublisher


@pytest.fixture
def go_publisher() -> Iterator[Callable[..., GoPublisher]]:
    """Makes publishers of the Go library, each in a process of its own."""
    with ExitStack() as running:

        def make(partitions: int = 2, **options: Any) -> GoPublisher:
            publisher = GoPublisher(partitions, **options)
            running.enter_context(publisher)
            return publisher

        yield make
