"""Run an application's own handler and store through simulated histories: `simulate`.

Everything runs on virtual time, and a seed decides everything that is random::

    simulate(handler, store, applied=applied)
"""

from __future__ import annotations

from feedapi_client.testing.simulator.simulation import SimulationError, simulate

__all__ = ["SimulationError", "simulate"]
