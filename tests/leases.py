"""Leases to put."""

from __future__ import annotations

from collections.abc import Mapping

from feedapi_client.stores import Lease


def claims(instance: str, epochs: Mapping[int, int]) -> list[Lease]:
    """Return the leases that claim these partitions, which have these epochs."""
    return [Lease(partition, instance, epoch + 1) for partition, epoch in epochs.items()]
