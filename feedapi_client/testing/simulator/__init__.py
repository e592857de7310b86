"""A deterministic simulation of a whole consumer: its runtime, its store, its process, a publisher.

It runs on virtual time, and a seed decides everything that is random. A run that fails can be
repeated exactly::

    python -m feedapi_client.testing.simulator --seed 42

`simulate` runs an application's own handler and store through such histories.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feedapi_client.testing.simulator.simulate_application import SimulationError, simulate

__all__ = ["SimulationError", "simulate"]


if not TYPE_CHECKING:  # a type checker knows the names from above, and no others

    def __getattr__(name: str) -> Any:
        # Names are loaded at their first use: the modules of this package import it by its name.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.simulate_application"), name)
