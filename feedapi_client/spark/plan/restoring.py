"""Which feeds of a stored plan a query goes on with. Imports no Spark."""

from __future__ import annotations

from collections.abc import Sequence

from feedapi_client.errors import LineageError
from feedapi_client.model import public_url
from feedapi_client.spark.connection import FeedConnection
from feedapi_client.spark.plan.epoch import FeedPlan
from feedapi_client.spark.plan.feed import key_of


def match_feeds(
    connections: Sequence[FeedConnection], plans: Sequence[FeedPlan]
) -> list[int | None]:
    """Return the number of each plan's connection; None where the query no longer names the feed.

    Where there are several, each connection goes on from the discovery in its plan: the others need
    not wait for a feed that can't be reached now.

    Whether the cursors are valid there (the query of the URL, the selection of events) is for
    `FeedPlanner` to check.

    Raises:
        LineageError: the query names none of the feeds.
        FeedError: the plan is of an earlier version, which stored no names, and a feed that has to
            be asked for the name of a filter does not answer.
    """
    if len(connections) == len(plans) == 1:
        return [0]
    names = {_plain(connection.url): number for number, connection in enumerate(connections)}
    previous = connections[0].options.previous_url
    if previous is not None:
        names.setdefault(_plain(public_url(previous)), 0)
    found = [
        names.get(_plain(plan.name)) if plan.name else _by_key(connections, plan) for plan in plans
    ]
    if all(number is None for number in found):
        raise LineageError(
            "the checkpoint of this query belongs to other feeds, or to another selection of "
            "events (filter.NAME, eventTypes, skipEventTypes): a query goes on only with a feed "
            "of its checkpoint among those that it reads. Name one, or start a new query with a "
            "checkpoint location of its own",
            feed=connections[0].url,
        )
    for number, plan in zip(found, plans, strict=True):
        if number is not None and len(connections) > 1:
            connections[number].restore(plan.info)
    return found


def _plain(name: str) -> str:
    return name.rstrip("/")


def _by_key(connections: Sequence[FeedConnection], plan: FeedPlan) -> int | None:
    for number, connection in enumerate(connections):
        if key_of(connection) == plan.feed:
            return number
    return None
