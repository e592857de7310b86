"""The table of checks: discovery and lineage."""

from __future__ import annotations

from feedapi_client.cli.doctor.checks import discovery, lineage, needs
from feedapi_client.cli.doctor.checks.base import Check, Level

_NEGOTIATION = "specification, Protocol negotiation"
_PARTITIONS = "specification, Discovery call, partitions"
_FLAGS = "specification, Discovery call, flags"
_METHOD_1 = "specification, Partitions, method 1"
_METHOD_2 = "specification, Partitions, method 2"
_FIELD = "publishers in the field"
_V2 = needs.dialects("v2-draft", "v2-token")

DISCOVERY: tuple[Check, ...] = (
    Check(
        id="discovery-answers",
        level=Level.MUST,
        requirement="A GET without arguments is answered with status 200 and a JSON object that "
        "lists `partitions`; by a v1 feed with status 400.",
        cost="A consumer does not start. One that runs goes on with the topology it knows, and "
        "does not see splits.",
        source=_NEGOTIATION,
        rules=("R1", "R10"),
        needs=(),
        find=discovery.answers,
    ),
    Check(
        id="partition-id",
        level=Level.MUST,
        requirement="Each partition has an `id` that holds an integer from 0 to 32767.",
        cost="A consumer refuses the whole discovery.",
        source=_PARTITIONS,
        rules=("R12",),
        needs=(needs.DOCUMENT,),
        find=discovery.ids_in_range,
    ),
    Check(
        id="partition-id-string",
        level=Level.MUST,
        requirement="An `id` is a string, without leading zeros.",
        cost="This library accepts numbers. Clients with typed decoders fail at the discovery.",
        source=_PARTITIONS,
        rules=("R12",),
        needs=(needs.DOCUMENT,),
        find=discovery.ids_are_strings,
    ),
    Check(
        id="partition-unique",
        level=Level.MUST,
        requirement="No partition is listed twice.",
        cost="A consumer refuses the whole discovery.",
        source=_PARTITIONS,
        rules=("R12",),
        needs=(needs.DOCUMENT,),
        find=discovery.ids_are_unique,
    ),
    Check(
        id="discovery-types",
        level=Level.MUST,
        requirement="`closed` is a boolean; `lastCursor` and `token` are strings; `stream` and "
        "`exactlyOnce` are booleans or objects; `filters` is a list of strings.",
        cost="A consumer refuses the whole discovery.",
        source=_FLAGS,
        rules=("R12",),
        needs=(needs.DOCUMENT,),
        find=discovery.field_types,
    ),
    Check(
        id="last-cursor-listed",
        level=Level.MUST,
        requirement="A closed partition has `lastCursor`.",
        cost="A consumer can't tell the end from a replica that lags: it asks twice, and may end "
        "too early.",
        source=_PARTITIONS,
        rules=("R6",),
        needs=(needs.dialects("v2-draft"), needs.CLOSED),
        find=discovery.last_cursor_listed,
    ),
    Check(
        id="last-cursor-text",
        level=Level.MUST,
        requirement="`lastCursor` is printable ASCII of at most 16 KiB.",
        cost="A consumer refuses the whole discovery: it could neither store the cursor nor send "
        "it.",
        source=_FIELD,
        rules=("R18",),
        needs=(needs.DOCUMENT,),
        find=discovery.last_cursor_text,
    ),
    Check(
        id="one-split-method",
        level=Level.MUST,
        requirement="A partition has `startsAfterPartition` or `cursorFromPartitions`, not both.",
        cost="A consumer refuses the whole discovery: it can't know where to begin.",
        source=_PARTITIONS,
        rules=("R12",),
        needs=(needs.INFO, _V2),
        find=lineage.one_method,
    ),
    Check(
        id="lineage-types",
        level=Level.MUST,
        requirement="`startsAfterPartition` is an id, `cursorFromPartitions` a list of ids.",
        cost="A consumer refuses the whole discovery.",
        source=_PARTITIONS,
        rules=("R12",),
        needs=(needs.DOCUMENT,),
        find=lineage.lineage_types,
    ),
    Check(
        id="no-cycle",
        level=Level.MUST,
        requirement="No partition descends from itself.",
        cost="A consumer refuses the whole discovery.",
        source=_PARTITIONS,
        rules=("R12",),
        needs=(needs.INFO, _V2),
        find=lineage.no_cycle,
    ),
    Check(
        id="parent-closed",
        level=Level.MUST,
        requirement="`startsAfterPartition` points to a closed partition.",
        cost="The children wait for ever: their parent never ends.",
        source=_METHOD_1,
        rules=("R8",),
        needs=(needs.INFO, _V2),
        find=lineage.parents_are_closed,
    ),
    Check(
        id="parent-listed",
        level=Level.MUST,
        requirement="A parent stays in the list, with the history before the split.",
        cost="A new consumer never sees that history. One that waited for the parent ends with "
        "`LostPartitionError`.",
        source=_METHOD_1,
        rules=("R8",),
        needs=(needs.INFO, _V2),
        find=lineage.parents_are_listed,
    ),
    Check(
        id="ancestor-gone",
        level=Level.MUST,
        requirement="The partitions in `cursorFromPartitions` are no longer listed.",
        cost="Their whole history is on the new partitions too: a new consumer may read it twice.",
        source=_METHOD_2,
        rules=("R9",),
        needs=(needs.INFO, _V2),
        find=lineage.ancestors_are_gone,
    ),
    Check(
        id="discovery-usable",
        level=Level.MUST,
        requirement="A consumer of this library accepts the discovery.",
        cost="It does not start.",
        source=_NEGOTIATION,
        rules=("R1", "R12"),
        needs=(needs.DOCUMENT,),
        find=discovery.usable,
    ),
    Check(
        id="closed-final",
        level=Level.MUST,
        requirement="A closed partition stays closed, and its `lastCursor` stays what it is.",
        cost="A consumer is done with it: what comes later is never read.",
        source="specification, Partitions, starting and closing partitions",
        rules=("R6",),
        needs=(needs.DISCOVERIES, needs.CLOSED),
        find=discovery.closed_is_final,
    ),
    Check(
        id="lineage-string",
        level=Level.DEVIATION,
        requirement="`startsAfterPartition` and `cursorFromPartitions` hold strings.",
        cost="This library accepts numbers. Clients with typed decoders fail at the discovery.",
        source=_FIELD,
        rules=("R12",),
        needs=(needs.DOCUMENT,),
        find=lineage.lineage_is_strings,
    ),
    Check(
        id="lineage-names",
        level=Level.DEVIATION,
        requirement="Lineage is in `startsAfterPartition` and `cursorFromPartitions`, not in "
        "`startsAfterParent` and `splitFromAncestors`, as one example spells them.",
        cost="Other clients don't see the lineage: they read out of order, or from the beginning.",
        source=_FIELD,
        rules=("R12",),
        needs=(needs.DOCUMENT,),
        find=lineage.lineage_names,
    ),
    Check(
        id="lineage-zero",
        level=Level.DEVIATION,
        requirement="A partition without a parent has no `startsAfterPartition`: 0 is a partition.",
        cost="No parent 0 can be trusted: the children of partition 0 are read beside it.",
        source=_FIELD,
        rules=("R8", "R12"),
        needs=(needs.DOCUMENT,),
        find=lineage.no_zero_values,
    ),
    Check(
        id="lineage-edge",
        level=Level.DEVIATION,
        requirement="Where a partition is closed and others replace it, they name it, partition 0 "
        "included.",
        cost="Children are read beside their parent, out of order, unless each consumer gives "
        "`lineage=`.",
        source=_FIELD,
        rules=("R8",),
        needs=(needs.INFO, _V2, needs.CLOSED),
        find=lineage.edges_are_listed,
    ),
    Check(
        id="discovery-stable",
        level=Level.DEVIATION,
        requirement="All replicas, versions and caches answer discovery alike, and the token "
        "changes with the partitions only.",
        cost="Refusals and rediscoveries in turn: a consumer gets on slowly, and stops after "
        "`RetryPolicy.refused_for`.",
        source=_FIELD,
        rules=("R2", "R10"),
        needs=(needs.DISCOVERIES,),
        find=discovery.stable,
    ),
)
