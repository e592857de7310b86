"""Names: which ones a table, a format and a path can hold, and which of them are the same.

What can't be held is refused before anything is written. What can be held is quoted where it is
used (`feedapi_client.spark.ingest.delta_table.column`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from pyspark.sql import SparkSession
from pyspark.sql import types as T  # noqa: N812 - its usual name

if TYPE_CHECKING:
    from feedapi_client.spark.ingest.job import Ingest

Fold = Callable[[str], str]

TABLES = ("output", "bronze", "rejected", "gold")
"""Arguments of `Ingest`."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:")
_COLON = re.compile(rf"file://[^/]|(?:{_SCHEME.pattern}(?://[^/]*)?)?+[^:]*:")
_PATTERN = re.compile(r"[\[\]{}*?\\\x00-\x1f]")
_PART = re.compile(r"(?:`[^`]*`)+|[^.`]+")
_TAKEN = re.compile(r"\w+|`\w+`", re.ASCII)
_NOT_IN_FOLDER = re.compile(r"^\.|[/\\=*?\[\]{}%:#\"\x00-\x1f\x7f]")
FOLDER_BYTES = 255
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""What the name of a folder has for NULL."""
_OWN = "_feedapi"
_NOT_STORED = (T.CalendarIntervalType, T.DayTimeIntervalType, T.YearMonthIntervalType, T.NullType)


def as_url(path: str) -> str:
    """Return the URL of a location as Spark takes it, the same for all its spellings."""
    path = re.sub("^file:/*", "/", path).rstrip("/")
    if _SCHEME.match(path):
        return f"s3{path[3:]}" if path.startswith("s3a:") else path
    return Path(path or "/").resolve().as_uri()


def unquoted(url: str) -> str:
    """Return the URL as Spark names it: in that of a file nothing is quoted."""
    return unquote(url) if url.startswith("file:") else url


def in_folder(text: str) -> str:
    """Return a text as the name of a folder has it: Spark reads `%C3` as one character."""
    return "".join(quote(one, safe="") if one.isascii() else one for one in text)


def in_catalog(spark: SparkSession, table: str) -> str:
    """Return the name of a table with its catalog and schema, as the session completes it."""
    first, *others = _PART.findall(table)
    if len(others) > 1 or spark.conf.get(f"spark.sql.catalog.{first.strip('`')}", None):
        return table
    catalog = spark.catalog.currentCatalog()
    if not catalog.isidentifier():  # Spark quotes the schema where it must, the catalog never
        catalog = f"`{catalog}`"
    here = [catalog, spark.catalog.currentDatabase()]
    return ".".join([*here[: 2 - len(others)], table])


def catalog_takes(spark: SparkSession, table: str) -> bool:
    """Whether the catalog can hold the name of a table, which may be quoted.

    Spark's own says so only after the table's folder was made.
    """
    catalog, *names = _PART.findall(in_catalog(spark, table))
    return catalog != "spark_catalog" or all(_TAKEN.fullmatch(name) for name in names)


def same_tables(spark: SparkSession, job: Ingest, tables: Iterable[str | None]) -> set[str]:
    """Return names of tables that are the same for all their spellings."""
    named = filter(None, tables)
    if job.is_files:
        return set(map(as_url, named))
    return {in_catalog(spark, name).replace("`", "").lower() for name in named}


def folded(spark: SparkSession, job: Ingest) -> Fold:
    """Return what makes two names of columns equal that are the same for the session's SQL.

    In Delta they are the same in any case, whatever the session says.
    """
    exact = str(spark.conf.get("spark.sql.caseSensitive", "false")).lower() == "true"
    return str if exact and job.is_files else str.lower


def types_in(kind: T.DataType) -> Iterator[T.DataType]:
    """Yield a type and all those inside of it."""
    yield kind
    inside: list[T.DataType] = []
    if isinstance(kind, T.StructType):
        inside = [field.dataType for field in kind]
    elif isinstance(kind, T.ArrayType):
        inside = [kind.elementType]
    elif isinstance(kind, T.MapType):
        inside = [kind.keyType, kind.valueType]
    for one in inside:
        yield from types_in(one)


def fields_in(kind: T.DataType) -> Iterator[T.StructField]:
    """Yield all fields of a type, those inside of others too."""
    return (field for one in types_in(kind) if isinstance(one, T.StructType) for field in one)


def problems_of_locations(job: Ingest) -> Iterator[str]:
    """Yield what is wrong with the places of the tables and of the query's own files."""
    given = {name: getattr(job, name) for name in TABLES}
    own = {"checkpoint": job.checkpoint, "staging": job.staging}
    for name, path in {**(given if job.is_files else {}), **own}.items():
        if path and (_PATTERN.search(path) or _COLON.match(path)):
            yield (
                f"{name} {path!r} can't be read back: Spark takes [ ] {{ }} * ? and \\ in a path "
                "for a pattern, text before : for a scheme, in lower case, and finds no host of "
                "file:. Name another folder"
            )
    if not job.is_files:  # names in a catalog are compared where there is a session
        paths = [f"{name} {path}" for name, path in given.items() if path and "/" in path]
        if paths:
            yield (
                f"{', '.join(paths)} is a path, and format {job.format} writes to tables of a "
                "catalog: CREATE SCHEMA ... LOCATION names the folder of its tables"
            )
        return
    tables = {name: as_url(path) for name, path in given.items() if path}
    if len(set(tables.values())) < len(tables):
        yield "output, bronze, rejected and gold must be different tables"
    others = tables | {name: as_url(path) for name, path in own.items() if path}
    for (name, table), (other, place) in product(tables.items(), others.items()):
        if other == name or not f"{place}/".startswith(f"{table}/"):
            continue
        hidden = place.removeprefix(table)[1:2] in ("_", ".")
        if (place != table and (other in tables or not hidden)) or (other in own and not hidden):
            yield f"{other} lies inside of {name}, where readers would take it for rows"
    yield from _problems_of_folders(job)


def _problems_of_folders(job: Ingest) -> Iterator[str]:
    """Yield what is wrong with names that become folders: ``<prefix>feed=<feed>``."""
    if _NOT_IN_FOLDER.search(job.prefix):
        yield (
            f"prefix {job.prefix!r} begins names of folders: it must not begin with a dot, which "
            'hides them, nor hold any of / \\ = * ? [ ] { } % : # "'
        )
    if job.feed_name == NO_VALUE:
        yield f"the feed's name can't be {NO_VALUE}, which is read as NULL: give one with --feed"
    folder = f"{job.prefix}feed={in_folder(job.feed_name)}"
    if len(folder.encode()) > FOLDER_BYTES:
        yield (
            f"the feed's name is too long for a folder ({len(folder.encode())} bytes of at most "
            f"{FOLDER_BYTES}): give a shorter one with --feed"
        )
    hidden = [name for name in job.partition_by if name.startswith(".")]
    if hidden:
        yield f"partition_by {', '.join(hidden)}: a folder that begins with a dot is hidden"


def check_names(columns: T.StructType, added: Collection[str], fold: Fold) -> None:
    """Raise ValueError when names of columns are `added` by this library, or are there twice."""
    ours = {fold(name) for name in added}
    taken = [name for name in columns.names if fold(name) in ours or name.lower().startswith(_OWN)]
    if taken:
        raise ValueError(
            f"columns {', '.join(taken)} have names of columns that the table gets from this "
            "library: give those a prefix, such as --prefix feed_"
        )
    for struct in types_in(columns):
        names = struct.names if isinstance(struct, T.StructType) else []
        counts = Counter(map(fold, names))
        twice = [name for name in names if counts[fold(name)] > 1]
        if twice:
            raise ValueError(
                f"columns {', '.join(twice)} have the same name, as this session compares names "
                "(spark.sql.caseSensitive)"
            )


def check_output(job: Ingest, columns: T.StructType, added: Collection[str], fold: Fold) -> None:
    """Raise ValueError when the table `output` can't hold the columns, beside those `added`."""
    check_names(columns, added, fold)
    kinds = {fold(field.name): field.dataType for field in columns}
    for what, wanted in (("partition_by", job.partition_by), ("key", job.key)):
        unknown = [name for name in wanted if fold(name) not in kinds]
        if unknown:
            raise ValueError(f"{what} names {', '.join(unknown)}, which output does not have")
        if len(set(map(fold, wanted))) < len(wanted):
            raise ValueError(f"{what} names a column twice: {', '.join(wanted)}")
    replaced = [field.name for field in fields_in(columns) if "${" in field.name]
    if replaced and not job.is_files:
        raise ValueError(f"columns {', '.join(replaced)}: Spark replaces ${{...}} in SQL")
    wrong = [f.name for f in columns if any(_not_stored(job, one) for one in types_in(f.dataType))]
    if wrong:
        raise ValueError(f"columns {', '.join(wrong)} have a type that {job.format} can't store")
    for name in job.partition_by:
        kind = kinds[fold(name)]
        guessed = job.is_files and isinstance(kind, T.BinaryType | T.TimestampType)
        no_folder = isinstance(kind, T.VariantType) or is_collated(kind)
        if guessed or no_folder or not isinstance(kind, T.AtomicType):
            raise ValueError(
                f"partition_by {name}: not every reader gets the same {kind.simpleString()} from "
                "the name of a folder: take a column of text, numbers or dates"
            )
    for name in job.key:
        kind = kinds[fold(name)]
        if any(isinstance(one, T.MapType | T.VariantType) for one in types_in(kind)):
            raise ValueError(f"key {name}: no two values of {kind.simpleString()} can be compared")


def _not_stored(job: Ingest, kind: T.DataType) -> bool:
    if isinstance(kind, T.StructType):
        return not kind.fields
    if isinstance(kind, T.UserDefinedType):
        return not job.is_files
    if isinstance(kind, T.StringType):
        return not job.is_files and is_collated(kind)
    return isinstance(kind, _NOT_STORED) or kind.typeName() == "time"


def is_collated(kind: T.DataType) -> bool:
    """Whether the type compares texts otherwise than by their bytes."""
    return isinstance(kind, T.StringType) and kind.collation != T.StringType().collation
