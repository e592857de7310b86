"""A deterministic simulation of a whole consumer: its runtime, its store, its process, a publisher.

It runs on virtual time, and a seed decides everything that is random. A run that fails can be
repeated exactly::

    python -m feedapi_client.testing.simulator --seed 42

`simulate` runs an application's own handler and store through such histories.
"""

from __future__ import annotations

from feedapi_client.testing.simulator.simulate import SimulationError, simulate

__all__ = ["SimulationError", "simulate"]
