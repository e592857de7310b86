"""Work on stored state as functions: what an operator does with cursors and leases.

The command line calls these functions, and an application may. They take an open store, so that it
is the caller who says which database and which connection. None of them prints or asks. Results
are frozen. Operations on quarantined events are in `feedapi_client.quarantine`.

Each function that changes positions refuses to do so while instances that share the feed are
alive, unless `force` is given: they hold positions in memory, and may read past what is changed, or
replace it. A consumer without `share` that runs meanwhile ends with `FencedError` at its next
commit.

Raises: all functions raise `StoreError` when the store fails, and `OperationError`, which is a
`StoreError`, when they refuse what is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feedapi_client.operations.exported import (
        export_positions,
        import_positions,
        parse_export,
    )
    from feedapi_client.operations.feed_access import FeedAccess
    from feedapi_client.operations.feed_lag import LagState, PartitionLag, lag
    from feedapi_client.operations.repair import (
        Change,
        drain,
        restore,
        rewind,
    )
    from feedapi_client.operations.skip_to_end import Skipped, skip
    from feedapi_client.operations.stored_positions import (
        FeedLeases,
        FeedPositions,
        OperationError,
        check_unused,
        list_leases,
        list_positions,
        move,
        rename,
        reset,
        set_position,
    )

__all__ = [
    "Change",
    "FeedAccess",
    "FeedLeases",
    "FeedPositions",
    "LagState",
    "OperationError",
    "PartitionLag",
    "Skipped",
    "check_unused",
    "drain",
    "export_positions",
    "import_positions",
    "lag",
    "list_leases",
    "list_positions",
    "move",
    "parse_export",
    "rename",
    "reset",
    "restore",
    "rewind",
    "set_position",
    "skip",
]

_MODULES = ("stored_positions", "exported", "feed_access", "feed_lag", "repair", "skip_to_end")


if not TYPE_CHECKING:  # a type checker knows the names from above, and no others

    def __getattr__(name: str) -> Any:
        # Names are loaded at their first use: the help of a command needs none.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        modules = (import_module(f"{__name__}.{module}") for module in _MODULES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
