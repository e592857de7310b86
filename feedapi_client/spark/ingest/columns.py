"""The columns of the tables: typed events, and rejected events with the reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql import types as T  # noqa: N812 - its usual name

from feedapi_client.spark.ingest.ingest_errors import plain_message
from feedapi_client.spark.ingest.job import CORRUPT, Ingest, IngestError
from feedapi_client.spark.ingest.names import (
    FOLDER_BYTES,
    NO_VALUE,
    check_names,
    folded,
    is_collated,
    types_in,
)

IDENTITY = ("feed", "query", "batch")
"""Which feed, streaming query and micro-batch a row comes from."""

EVENT = ("partition", "cursor", "sequence", "depth", "headers")
REASON = "reason"
INGESTED_AT = "ingested_at"

_PARSED = "_feedapi_parsed"
_SENT = "_feedapi_sent"
_NAMED = "_feedapi_named"
_REASON = "_feedapi_reason"
_SETTINGS = {
    "spark.sql.legacy.timeParserPolicy": ("CORRECTED",),
    "spark.sql.legacy.json.allowEmptyString.enabled": ("FALSE",),
    "spark.sql.timestampType": ("TIMESTAMP_LTZ",),
    "spark.sql.parquet.outputTimestampType": ("TIMESTAMP_MICROS", "INT96"),
    "spark.sql.parquet.datetimeRebaseModeInWrite": ("CORRECTED",),
    "spark.sql.parquet.int96RebaseModeInWrite": ("CORRECTED",),
}
"""What a session must have, where a read or write has no option: 2026-13-45 is 2027-02-14 for older
rules, `""` no number but NULL, TIMESTAMP without an offset, microseconds may be cut, and days
before 1582 shifted or refused."""


def payload_schema(spark: SparkSession, job: Ingest) -> T.StructType | None:
    """Return the schema of the payload, None without one.

    Raises:
        IngestError: the DDL is wrong, a column has the name of one of ours, or of another, or the
            session has settings that would change values.
    """
    if job.schema is None:
        return None
    try:
        schema = T.DataType.fromDDL(job.schema)
    except Exception as error:  # py4j's, where a type needs a setting
        what = plain_message(error)
        raise IngestError(f"schema {job.schema!r} can't be parsed: {what}") from error
    if not isinstance(schema, T.StructType):
        raise IngestError(f"schema {job.schema!r} must be columns, such as 'id STRING, n INT'")
    fold = folded(spark, job)
    unknown = [name for name in job.key if fold(name) not in map(fold, schema.names)]
    if unknown:
        raise IngestError(
            f"key names {', '.join(unknown)}, which the schema does not have: an event without its "
            "key is rejected before a transform could make one"
        )
    ours = [f"{job.prefix}{name}" for name in (*IDENTITY, *EVENT, *(["data"] * job.keep_data))]
    try:
        check_names(schema, [*ours, CORRUPT], fold)
    except ValueError as error:
        raise IngestError(f"schema {error}") from error
    unread = [kind.simpleString() for kind in types_in(schema) if _reads_no_json(kind)]
    if unread:
        raise IngestError(
            f"schema has {', '.join(unread)}, which no JSON is read as: take STRING, also for the "
            "keys of a MAP"
        )
    for name, sound in _SETTINGS.items():
        given = str(spark.conf.get(name, sound[0]))
        if given.upper() not in sound:
            raise IngestError(
                f"this session would change values: {name} is {given}. Set it to {sound[0]}"
            )
    return schema


def _reads_no_json(kind: T.DataType) -> bool:
    keys = kind.keyType if isinstance(kind, T.MapType) else T.StringType()
    unread = kind.typeName() in ("char", "varchar", "geography", "geometry")
    return unread or is_collated(kind) or not isinstance(keys, T.StringType)


class Rows:
    """The rows of micro-batches for each table. Without a schema a payload stays as it is.

    The columns are made once: PySpark takes some 20 ms for those of each column of the schema.
    """

    def __init__(self, spark: SparkSession, job: Ingest, schema: T.StructType | None) -> None:
        self._job = job
        self._fold = folded(spark, job)
        self._steps: list[dict[str, Column]] = []
        self._output = [*map(F.col, EVENT), _text(), F.current_timestamp().alias(INGESTED_AT)]
        if schema is not None:
            self._parse(schema)

    def parsed(self, batch: DataFrame) -> DataFrame:
        """Return a micro-batch with what `tables` needs."""
        for step in self._steps:
            batch = batch.withColumns(step)
        return batch.drop(_SENT, _NAMED)

    def tables(self, parsed: DataFrame) -> dict[str, DataFrame]:
        """Return the rows of each table: output, and of bronze and rejected those that there are.

        - output: the typed events, or every event without a schema.
        - bronze: every event as sent.
        - rejected: the events that don't fit the schema, with the reason.
        """
        event = [*map(F.col, EVENT), _text()]
        now = F.current_timestamp().alias(INGESTED_AT)
        fits = F.lit(True) if self._job.rejected is None else F.col(_REASON).isNull()
        found = {"output": parsed.where(fits).select(*self._output)}
        if self._job.bronze is not None:
            found["bronze"] = parsed.select(*event, now)
        if self._job.rejected is not None:
            reason = F.col(_REASON).alias(REASON)
            found["rejected"] = parsed.where(~fits).select(*event, reason, now)
        return found

    def _parse(self, schema: T.StructType) -> None:
        job = self._job
        kept = T.StructType([*schema.fields, T.StructField(CORRUPT, T.StringType())])
        data = F.when(_unreadable().isNull(), F.col("data"))
        parsed = F.from_json(data, kept, {"columnNameOfCorruptRecord": CORRUPT, **_PARSING})
        required = [field.name for field in schema if not field.nullable]
        if job.gold is not None:
            required += [name for name in job.key if name not in required]
        # What is sent is parsed again only where it can mean something else.
        often = any(isinstance(kind, _READ_OTHERWISE) for kind in types_in(schema))
        sent = F.from_json(data, _as_sent(schema), _PARSING)
        sent = F.when(F.lit(often) | F.col("data").rlike(_FRACTION), sent)
        # So are the names that are sent, where a value is NULL that may have been sent.
        named = F.from_json("data", "MAP<STRING, STRING>", _PARSING)
        unknown = [_is_corrupt(), *(F.col(_PARSED)[name].isNull() for name in required)]
        named = F.when(F.greatest(F.lit(False), *unknown), named)
        changed = list(self._changed_fields(schema))
        values = {name: F.col(_PARSED)[name] for name in schema.names}
        for name, found, _ in changed:
            values[name] = F.when(~found, values[name])
        sound = F.struct(*(value.alias(name) for name, value in values.items()))
        reason = _reason(schema, required, changed)
        self._steps = [
            {_PARSED: parsed, _SENT: sent},
            {_NAMED: named},
            {_REASON: reason, _PARSED: sound},
        ]
        self._output = [F.col(name).alias(f"{job.prefix}{name}") for name in EVENT]
        if job.keep_data:
            self._output.append(_text().alias(f"{job.prefix}data"))
        self._output.append(F.col(f"{_PARSED}.*"))
        if job.rejected is None:
            corrupt = F.when(F.col(_REASON).isNotNull(), _text())
            self._output.append(corrupt.alias(CORRUPT))

    def _changed_fields(self, schema: T.StructType) -> Iterator[tuple[str, Column, str]]:
        """Yield fields that may be read as another value than was sent, whether, and the reason."""
        partitions = set(map(self._fold, self._job.partition_by))
        for field in schema:
            name, kind, parsed = field.name, field.dataType, F.col(_PARSED)[field.name]
            found = _changed(kind, parsed, F.col(_SENT)[name])
            if found is not None:
                yield name, found, f"{name} is not {kind.simpleString()}"
            if isinstance(kind, T.StringType) and self._fold(name) in partitions:
                yield name, _no_folder(name, parsed), f"{name} can't be the name of a folder"


_PARSING = {
    "timeZone": "UTC",
    "enableDateTimeParsingFallback": "false",
    "allowNonNumericNumbers": "false",
    "maxStringLen": "2147483647",
}
"""Options of every parser: a time without an offset is the same in every session, digits are not
taken for a number of days, nor texts for numbers, and texts are as long as events may be."""

_TIMES = (T.TimestampType, T.TimestampNTZType, T.DateType)
_READ_OTHERWISE = (*_TIMES, T.DecimalType, T.ByteType)
"""Types of which Spark takes texts and numbers that mean something else."""

_FRACTION = r"[:,\[]\s*-?\d+(\.\d|[eE])"
_TOO_LARGE = r"\d[eE]\+?\d{3}|\d{309}"
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_DATE = r"^\s*(?!0000)\d{4}-\d{1,2}-\d{1,2}"
_SECONDS = (-62135596800, 253402300799)
"""Of the years 1 to 9999."""


def _changed(kind: T.DataType, parsed: Column, sent: Column) -> Column | None:
    """Return whether the value was read as another one than was sent; None where it can't be.

    - A TIMESTAMP takes numbers for seconds, and wraps around at 2**63 microseconds: those of
      other units come out in any year. Text without a date gets that of the day.
    - A DATE loses a time that is sent with it. All times get a month and a day where none is sent.
    - A DECIMAL is rounded, and ``1,5`` read as 15.
    - A TINYINT takes 128 to 255 for -128 to -1.
    - A STRING gets numbers with a fraction, also those in lists and objects, by way of DOUBLE.
    - A number that is too large for DOUBLE or FLOAT becomes infinite, and in a STRING or VARIANT
      the text "Infinity".
    - Fields of a struct that must not be NULL are.

    Arguments:
        sent: the same value, as `_as_sent` describes it.
    """
    if isinstance(kind, T.StructType):
        each = [_changed(f.dataType, parsed[f.name], sent[f.name]) for f in kind]
        each += [parsed.isNotNull() & parsed[f.name].isNull() for f in kind if not f.nullable]
        found = [one for one in each if one is not None]
        return F.greatest(F.lit(False), *found) if found else None
    if isinstance(kind, T.MapType):
        values = T.ArrayType(kind.valueType)
        return _changed(values, F.map_values(parsed), F.map_values(sent))
    if isinstance(kind, T.ArrayType):
        return _changed_inside(kind.elementType, parsed, sent)
    if isinstance(kind, T.DoubleType | T.FloatType):
        return _true(F.abs(parsed) == F.lit(math.inf))
    if isinstance(kind, T.VariantType):
        return _true(_infinite(parsed.cast("string")))
    if not isinstance(kind, (*_READ_OTHERWISE, T.StringType)):
        return None
    text = sent.cast("string")
    if isinstance(kind, T.StringType):
        same = (text == F.try_parse_json(parsed).cast("string")) & ~parsed.startswith('"')
        other = (text != parsed) & ~_true(same)
        # No VARIANT holds a name twice, and no list or object is compared with what it was then.
        inside = parsed.rlike(r"^[\[{]")
        unknown = inside & text.isNull() & parsed.rlike(_FRACTION)
        return _true(other | unknown | (inside & _infinite(parsed)))
    if isinstance(kind, T.ByteType):
        same = text.try_cast("tinyint") == parsed
    elif isinstance(kind, T.DecimalType):
        scale = min(38, max(kind.scale + 10, 38 - kind.precision + kind.scale))
        wide = f"decimal(38, {scale})"
        exact = text.try_cast(wide) == parsed.try_cast(wide)
        # Numbers of more digits than both can hold are compared as far as a DOUBLE goes.
        same = F.coalesce(exact, text.try_cast("double") == parsed.cast("double"))
    elif isinstance(kind, T.TimestampType):
        seconds = F.unix_seconds(parsed)
        number = text.rlike(r"^-?\d+$")
        as_sent = F.when(number, text.try_cast("decimal(38, 0)") == seconds)
        same = seconds.between(*_SECONDS) & as_sent.otherwise(text.rlike(_DATE))
    else:
        same = text.rlike(_DATE + (r"\s*$" if isinstance(kind, T.DateType) else ""))
    return parsed.isNotNull() & ~_true(same)


def _infinite(text: Column) -> Column:
    """Return whether text says that a number is infinite, where one was sent that is too large."""
    return text.contains("Infinity") & F.col("data").rlike(_TOO_LARGE)


def _is_corrupt() -> Column:
    return F.col(_PARSED).isNull() | F.col(_PARSED)[CORRUPT].isNotNull()


def _text() -> Column:
    """Return the payload as sent. Readers of Parquet refuse files with text that is not UTF-8."""
    return F.make_valid_utf8("data").alias("data")


def _unreadable() -> Column:
    """Return why the text of the payload is not read, null where it is.

    The escape of a surrogate without its partner (\\ud800) stands for no character, and Spark makes
    a question mark of it.
    """
    rest = F.regexp_replace("data", rf"\\\\|{_HIGH}{_LOW}", " ")
    surrogate = rf"{_HIGH}|{_LOW}"
    half = F.col("data").rlike(surrogate) & rest.rlike(surrogate)
    return F.when(~F.is_valid_utf8("data"), F.lit("not UTF-8")).when(
        half, F.lit("half of a surrogate pair is no character")
    )


def _no_folder(name: str, value: Column) -> Column:
    """Return whether text can't be in the name of a folder, or would be read back as NULL."""
    longest = FOLDER_BYTES - len(f"{quote(name, safe='')}=")
    escaped = F.regexp_replace(value, r"[\x00-\x1f\"#%'*/:=?\\\x7f{\[\]^]", "%00")
    nothing = value.isin("", NO_VALUE) | value.contains("\0")
    return _true(nothing | (F.octet_length(escaped) > longest))


def _changed_inside(kind: T.DataType, parsed: Column, sent: Column) -> Column | None:
    if _changed(kind, F.lit(None), F.lit(None)) is None:
        return None
    both = F.arrays_zip(parsed.alias("parsed"), sent.alias("sent"))

    def changed(pair: Column) -> Column:
        found = _changed(kind, pair["parsed"], pair["sent"])
        assert found is not None
        return found

    return _true(F.exists(both, changed))


def _true(condition: Column) -> Column:
    return F.coalesce(condition, F.lit(False))


def _as_sent(kind: T.DataType) -> Any:
    """Return the type with a VARIANT, which keeps all digits, where `_changed` asks for them."""
    if isinstance(kind, T.StructType):
        return T.StructType([T.StructField(f.name, _as_sent(f.dataType)) for f in kind])
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(_as_sent(kind.elementType))
    if isinstance(kind, T.MapType):
        return T.MapType(kind.keyType, _as_sent(kind.valueType))
    return T.VariantType() if isinstance(kind, (*_READ_OTHERWISE, T.StringType)) else kind


def _reason(
    schema: T.StructType, required: Sequence[str], changed: Sequence[tuple[str, Column, str]]
) -> Column:
    """Return why the event does not fit: null when it fits, else names of fields, never values."""
    parsed, sent = F.col(_PARSED), F.col(_NAMED)
    wrong = [
        F.when(
            sent.getItem(field.name).isNotNull() & parsed.getField(field.name).isNull(),
            F.lit(f"{field.name} is not {field.dataType.simpleString()}"),
        )
        for field in schema
    ]
    others = [F.when(found, F.lit(problem)) for _, found, problem in changed]
    missing = [
        F.when(
            sent.getItem(name).isNull() & parsed.getField(name).isNull(),
            F.lit(f"{name} is missing"),
        )
        for name in required
    ]
    corrupt = _is_corrupt()
    known = F.concat_ws("; ", *(F.when(corrupt, one) for one in wrong), *others, *missing)
    return (
        F.when(_unreadable().isNotNull(), _unreadable())
        .when(corrupt & sent.isNull(), F.lit("not a JSON object"))
        .when(known != "", known)
        .when(corrupt, F.lit("does not fit the schema"))
    )
