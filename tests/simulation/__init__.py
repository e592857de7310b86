"""A deterministic simulation of a whole consumer: its runtime, its store, its process, a publisher.

It runs on virtual time, and a seed decides everything that is random. A run that fails can be
repeated exactly::

    python -m tests.simulation --seed 42

It judges the library, and may import its insides. What a user's test needs is in
`feedapi_client.testing.simulator`.
"""
