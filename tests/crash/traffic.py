"""The feed during a crash test: growing, split by both methods, its token rotated."""

from __future__ import annotations

from collections import Counter
from random import Random

from feedapi_client.testing import Publisher

ENTITIES = 40
MAX_OPEN_PARTITIONS = 20


class Traffic:
    """A publisher and what happens to it.

    Each entity's events are numbered from 0. Every `split_every`-th disturbance is a split, the
    others rotate the token.
    """

    def __init__(self, random: Random, split_every: int) -> None:
        self._random = random
        self._split_every = split_every
        self._disturbances = 0
        self.publisher = Publisher(3, page_size=60, checkpoint_every=8, seed=random.getrandbits(32))
        self.published: Counter[str] = Counter()
        self.splits: Counter[str] = Counter()
        self.rotations = 0

    def publish(self, count: int) -> None:
        """Publish `count` events of random entities."""
        for _ in range(count):
            entity = f"entity {self._random.randrange(ENTITIES)}"
            self.publisher.publish(entity, {"entity": entity, "n": self.published[entity]})
            self.published[entity] += 1

    def disturb(self) -> None:
        """Split a partition, or rotate the token."""
        self._disturbances += 1
        if (
            self._disturbances % self._split_every
            or len(self.publisher.open_partitions()) >= MAX_OPEN_PARTITIONS
        ):
            self.publisher.rotate_token()
            self.rotations += 1
        elif self.splits["starts-after"] > self.splits["cursor-from"]:
            self._split("cursor-from", self._without_parent())
        else:
            # One partition without a parent must be left for the other method.
            spare = self._without_parent()[:1]
            self._split(
                "starts-after", [id for id in self.publisher.open_partitions() if id not in spare]
            )

    def _split(self, method: str, candidates: list[int]) -> None:
        self.publisher.split(
            self._random.choice(candidates), into=self._random.choice((2, 2, 3)), method=method
        )  # type: ignore[arg-type]
        self.splits[method] += 1

    def _without_parent(self) -> list[int]:
        # When a partition that starts after another one is split by cursor transfer, discovery
        # can't say what comes first.
        return [
            id
            for id, partition in self.publisher.partitions.items()
            if partition.starts_after is None and not partition.closed
        ]
