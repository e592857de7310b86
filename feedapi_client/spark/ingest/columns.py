"""The columns of the tables: typed events, and rejected events with the reason.

A payload is parsed twice: into the columns, and into VARIANT, which keeps values as they were sent.
What is not the same does not fit. Inside of lists and maps values are as `from_json` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from urllib.parse import quote

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql import types as T  # noqa: N812 - its usual name

from feedapi_client.spark.ingest.job import (
    CORRUPT,
    FOLDER_BYTES,
    NO_VALUE,
    Ingest,
    IngestError,
    plain_message,
)

EVENT = ("partition", "cursor", "sequence", "depth", "headers")
REASON = "reason"
INGESTED_AT = "ingested_at"

_PARSED = "_feedapi_parsed"
_SENT = "_feedapi_sent"
_KEYS = "_feedapi_keys"
_REASON = "_feedapi_reason"
_CORRUPT = "_feedapi_corrupt"
_PARSING = {
    "timeZone": "UTC",
    "enableDateTimeParsingFallback": "false",
    "allowNonNumericNumbers": "false",
    "maxStringLen": "2147483647",
}
"""Options of every parser: a time without an offset is the same in every session, digits are not
taken for a number of days, nor texts for numbers, and texts are as long as events may be."""

_READ_OTHERWISE = (T.TimestampType, T.TimestampNTZType, T.DateType, T.DecimalType, T.ByteType)
"""Types of which Spark takes texts and numbers that mean something else."""
_FRACTION = r"[:,\[]\s*-?\d+(\.\d|[eE])"
"""Of numbers that a STRING gets by way of DOUBLE."""
_TOO_LARGE = r"\d[eE]\+?\d{3}|\d{309}"
_DATE = r"^\s*(?!0000)\d{4}-\d{1,2}-\d{1,2}"
_SECONDS = (-62135596800, 253402300799)
"""Of the years 1 to 9999."""


def payload_schema(job: Ingest) -> T.StructType | None:
    if job.schema is None:
        return None
    try:
        schema = T.DataType.fromDDL(job.schema)
    except Exception as error:  # py4j's, where a type needs a setting
        what = plain_message(error)
        raise IngestError(f"schema {job.schema!r} can't be parsed: {what}") from error
    if not isinstance(schema, T.StructType):
        raise IngestError(f"schema {job.schema!r} must be columns, such as 'id STRING, n INT'")
    known = {name.lower() for name in schema.names}
    unknown = [name for name in job.key if name.lower() not in known]
    if unknown:
        raise IngestError(
            f"key names {', '.join(unknown)}, which the schema does not have: an event without its "
            "key is rejected before a transform could make one"
        )
    return schema


class Rows:
    """The rows of micro-batches for each table. Without a schema a payload stays as it is.

    The columns are made once: PySpark takes some 20 ms for those of each column of the schema.
    """

    def __init__(self, job: Ingest, schema: T.StructType | None) -> None:
        self._job = job
        self._steps: list[dict[str, Column]] = []
        self._output = [*map(F.col, EVENT), _data(), F.current_timestamp().alias(INGESTED_AT)]
        if schema is not None:
            self._add_types(schema)

    @property
    def reason(self) -> Column:
        """Of what `parse` returns: why an event does not fit the schema, null when it fits."""
        return F.col(_REASON) if self._steps else F.lit(None)

    def parse(self, batch: DataFrame) -> DataFrame:
        for step in self._steps:
            batch = batch.withColumns(step)
        return batch.drop(_SENT, _KEYS)

    def tables(self, parsed: DataFrame) -> dict[str, DataFrame]:
        """Output: typed events, or all without a schema. Rejected: those that do not fit."""
        event = [*map(F.col, EVENT), _data()]
        now = F.current_timestamp().alias(INGESTED_AT)
        fits = F.lit(True) if self._job.rejected is None else F.col(_REASON).isNull()
        found = {"output": parsed.where(fits).select(*self._output)}
        if self._job.bronze is not None:
            found["bronze"] = parsed.select(*event, now)
        if self._job.rejected is not None:
            reason = F.col(_REASON).alias(REASON)
            found["rejected"] = parsed.where(~fits).select(*event, reason, now)
        return found

    def _add_types(self, schema: T.StructType) -> None:
        job = self._job
        kept = T.StructType([*schema.fields, T.StructField(_CORRUPT, T.StringType())])
        as_sent = T.StructType([T.StructField(name, T.VariantType()) for name in schema.names])
        data = F.when(F.is_valid_utf8("data"), F.col("data"))
        parsed = F.from_json(data, kept, {"columnNameOfCorruptRecord": _CORRUPT, **_PARSING})
        # What is sent is parsed again only where it can mean something else, or nothing was read.
        unread = F.greatest(_is_corrupt(), *_nulls(schema, F.col(_PARSED)))
        other = F.lit(_is_read_otherwise(schema)) | F.col("data").rlike(_FRACTION)
        sent = F.when(other | unread, F.from_json(data, as_sent, _PARSING))
        keys = F.when(unread, F.json_object_keys(data))
        problems: list[Column] = []
        values = [value for field in schema for value in self._typed(field, problems)]
        self._steps = [
            {_PARSED: parsed},
            {_SENT: sent, _KEYS: keys},
            {_REASON: _reason(schema, problems), _PARSED: F.struct(*values)},
        ]
        self._output = [F.col(name).alias(f"{job.prefix}{name}") for name in EVENT]
        if job.keep_data:
            self._output.append(_data().alias(f"{job.prefix}data"))
        self._output.append(F.col(f"{_PARSED}.*"))
        if job.rejected is None:
            corrupt = F.when(F.col(_REASON).isNotNull(), _data())
            self._output.append(corrupt.alias(CORRUPT))

    def _typed(self, field: T.StructField, problems: list[Column]) -> Iterator[Column]:
        """Yield the value of a field, NULL for another one than was sent. Adds the reasons."""
        name, job = field.name, self._job
        value, sent = F.col(_PARSED)[name], F.col(_SENT)[name]
        same, fits = _same(field.dataType, value, sent), _fits(field.dataType, value, sent)
        problems.append(F.when(~fits, F.lit(f"{name} is not {field.dataType.simpleString()}")))
        if not field.nullable or (job.gold is not None and name in job.key):
            problems.append(F.when(fits & value.isNull(), F.lit(f"{name} is missing")))
        partitions = {one.lower() for one in job.partition_by}
        if isinstance(field.dataType, T.StringType) and name.lower() in partitions:
            named = _names_folder(name, value)
            problems.append(F.when(~named, F.lit(f"{name} can't be the name of a folder")))
            same = named if same is None else same & named
        yield (value if same is None else F.when(same, value)).alias(name)


def _reason(schema: T.StructType, problems: Sequence[Column]) -> Column:
    """Return why the event does not fit: null when it fits, else names of fields, never values."""
    other = F.concat(_other_letters(schema, F.col(_KEYS)), F.lit(" has other letters than here"))
    known = F.concat_ws("; ", other, *problems)
    return (
        F.when(~F.is_valid_utf8("data"), F.lit("not UTF-8"))
        .when(_is_corrupt() & F.col(_KEYS).isNull(), F.lit("not a JSON object"))
        .when(known != "", known)
        .when(_is_corrupt(), F.lit("does not fit the schema"))
    )


def _is_corrupt() -> Column:
    return F.col(_PARSED).isNull() | F.col(_PARSED)[_CORRUPT].isNotNull()


def _nulls(struct: T.StructType, parsed: Column) -> list[Column]:
    return [F.lit(False), *(parsed[name].isNull() for name in struct.names)]


def _other_letters(struct: T.StructType, keys: Column) -> Column:
    """Return the first name that is sent in other letters than a field's, which is not sent."""
    names, lower = struct.names, [name.lower() for name in struct.names]
    sent = F.transform(F.filter(keys, lambda key: key.isin(names)), F.lower)

    def is_other(key: Column) -> Column:
        return ~key.isin(names) & F.lower(key).isin(lower) & ~F.array_contains(sent, F.lower(key))

    return F.get(F.filter(keys, is_other), F.lit(0))


def _fits(kind: T.DataType, parsed: Column, sent: Column) -> Column:
    """Return whether a field has the value that was sent, and none where none was sent."""
    same = _same(kind, parsed, sent)
    nothing = sent.cast("string").isNull()
    return F.when(parsed.isNull(), nothing).otherwise(F.lit(True) if same is None else same)


def _same(kind: T.DataType, parsed: Column, sent: Column) -> Column | None:
    """Return whether a value was read as the one that was sent; None where it always is.

    - A TIMESTAMP takes numbers for seconds, and wraps around at 2**63 microseconds: those of
      other units come out in any year. Text without a date gets that of the day.
    - A DATE loses a time that is sent with it. All times get a month and a day where none is sent.
    - A DECIMAL is rounded, and ``1,5`` read as 15.
    - A TINYINT takes 128 to 255 for -128 to -1.
    - A STRING gets numbers with a fraction, also those in lists and objects, by way of DOUBLE.
    - A number that is too large for DOUBLE or FLOAT becomes infinite, and in a VARIANT, or in an
      object in a STRING, the text "Infinity".
    """
    text = sent.cast("string")
    if isinstance(kind, T.StructType):
        found = _same_struct(kind, parsed, sent)
    elif isinstance(kind, T.DoubleType | T.FloatType):
        found = F.abs(parsed) != F.lit(math.inf)
    elif isinstance(kind, T.StringType):
        # As JSON has it, which may be written otherwise; text in quotes is another text.
        again = (text == F.try_parse_json(parsed).cast("string")) & ~parsed.startswith('"')
        # No VARIANT holds a name twice.
        unknown = text.isNull() & ~parsed.rlike(_FRACTION)
        infinite = parsed.rlike(r"^[\[{]") & _is_infinite(parsed)
        found = (unknown | (text == parsed) | again) & ~infinite
    elif isinstance(kind, T.VariantType):
        found = ~F.coalesce(_is_infinite(parsed.cast("string")), F.lit(False))
    elif isinstance(kind, T.ByteType):
        found = text.try_cast("tinyint") == parsed
    elif isinstance(kind, T.DecimalType):
        scale = min(38, max(kind.scale + 10, 38 - kind.precision + kind.scale))
        wide = f"decimal(38, {scale})"
        exact = text.try_cast(wide) == parsed.try_cast(wide)
        # Numbers of more digits than both can hold are compared as far as a DOUBLE goes.
        found = F.coalesce(exact, text.try_cast("double") == parsed.cast("double"))
    elif isinstance(kind, T.TimestampType):
        seconds = F.unix_seconds(parsed)
        number = F.when(text.rlike(r"^-?\d+$"), text.try_cast("decimal(38, 0)") == seconds)
        found = seconds.between(*_SECONDS) & number.otherwise(text.rlike(_DATE))
    elif isinstance(kind, T.DateType | T.TimestampNTZType):
        found = text.rlike(_DATE + (r"\s*$" if isinstance(kind, T.DateType) else ""))
    else:
        return None
    return F.coalesce(found, F.lit(False))


def _is_infinite(text: Column) -> Column:
    """Return whether text says that a number is infinite, where one was sent that is too large."""
    return text.contains("Infinity") & F.col("data").rlike(_TOO_LARGE)


def _same_struct(struct: T.StructType, parsed: Column, sent: Column) -> Column:
    found = [parsed[field.name].isNotNull() for field in struct if not field.nullable]
    for field in struct:
        quotes = '"' if "'" in field.name else "'"
        inside = F.try_variant_get(sent, f"$[{quotes}{field.name}{quotes}]", "variant")
        found.append(_fits(field.dataType, parsed[field.name], inside))
    unread = F.greatest(F.lit(False), *_nulls(struct, parsed))
    keys = F.when(unread, F.json_object_keys(sent.cast("string")))
    return F.least(F.lit(True), _other_letters(struct, keys).isNull(), *found)


def _is_read_otherwise(kind: T.DataType) -> bool:
    if isinstance(kind, T.StructType):
        return any(_is_read_otherwise(field.dataType) for field in kind)
    return isinstance(kind, _READ_OTHERWISE)


def _names_folder(name: str, value: Column) -> Column:
    """Return whether text can be in the name of a folder, and is not read back as NULL."""
    longest = FOLDER_BYTES - len(f"{quote(name, safe='')}=")
    escaped = F.regexp_replace(value, r"[\x00-\x1f\"#%'*/:=?\\\x7f{\[\]^]", "%00")
    sound = ~value.isin("", NO_VALUE) & ~value.contains("\0")
    return value.isNull() | (sound & (F.octet_length(escaped) <= longest))


def _data() -> Column:
    """Return the payload as sent. Readers of Parquet refuse files with text that is not UTF-8."""
    return F.make_valid_utf8("data").alias("data")
