"""`ParquetTable`: a folder of Parquet files.

A micro-batch is the folder ``feed=<name>/query=<id>/batch=<number>``, whose names Spark reads as
columns. It is written to an attempt, a hidden folder that no other attempt uses. The attempts that
are noted first, in the folder of `output`, count for all tables of the query (`Decisions`), and are
shown to readers by whoever comes first: the run that wrote them, or a later one. Nothing that
readers see is changed or deleted, whenever a run is paused, killed, or wakes up.

All notes are files below ``_feedapi`` that are written once, by the first of several writers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import obstore
from obstore.exceptions import AlreadyExistsError
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    BinaryType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from feedapi_client.spark.ingest.checkpoint import READING, WRITING, checked_note, contents
from feedapi_client.spark.ingest.ingest_table import Identity, Table, identified
from feedapi_client.spark.ingest.job import IngestError, as_url, in_folder, plain_message
from feedapi_client.spark.source import is_connect
from feedapi_client.spark.staging import harmless, listed, newer_format, open_store

VERSION = 1
_ATTEMPTS = "_feedapi/attempts"
_COMMITS = "_feedapi/commits"
_COLUMNS = "_feedapi/columns"
_OWNERS = "_feedapi/owners"
_DONE = ".done"
_KEPT = 100
"""Decisions that are kept for runs that wake up late."""
_GUESSED = (BinaryType, TimestampType)
"""Types that the name of a folder has by the encoding and the time zone of the session."""
_OBJECT_STORES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss")
_COPIES = 16


class _LocalFolder:
    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self, path: str) -> set[str]:
        with suppress(FileNotFoundError):
            return set(os.listdir(self._root / path))
        return set()

    def create(self, path: str, text: str) -> None:
        """Write a file unless there is one: as a whole, where the file system has links."""
        file = self._root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
        try:
            new.write_text(text, "utf-8")
            try:
                os.link(new, file)
            except FileExistsError:
                return
            except OSError:  # a file system without links
                with suppress(FileExistsError), file.open("x", encoding="utf-8") as whole:
                    whole.write(text)
        finally:
            new.unlink(missing_ok=True)

    def read(self, path: str) -> str:
        return (self._root / path).read_text("utf-8")

    def publish(self, attempt: str, final: str) -> bool:
        """Show readers an attempt, unless they see one. Return whether they see one now.

        May be called again, also by several processes at once.
        """
        target = self._root / final
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            (self._root / attempt).rename(target)
        except OSError:  # it is there, or shown by another process
            if (self._root / attempt).exists() and not target.exists():
                raise
        return target.exists()

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            if (self._root / path).is_dir():
                shutil.rmtree(self._root / path)
            else:
                (self._root / path).unlink()


class _StoreFolder:
    """The same in an object store, where readers see one object of an attempt after the other."""

    def __init__(self, url: str) -> None:
        self._store = open_store(url)

    def names(self, path: str) -> set[str]:
        found = obstore.list_with_delimiter(self._store, prefix=f"{path}/")
        keys = [entry["path"] for entry in found["objects"]] + list(found["common_prefixes"])
        return {key.rstrip("/").rpartition("/")[2] for key in keys}

    def create(self, path: str, text: str) -> None:
        with suppress(AlreadyExistsError):
            obstore.put(self._store, path, text.encode(), mode="create", use_multipart=False)

    def read(self, path: str) -> str:
        return bytes(obstore.get(self._store, path).bytes()).decode()

    def publish(self, attempt: str, final: str) -> bool:
        written, there = self._below(attempt), self._below(final)

        def copy(name: str) -> None:
            obstore.copy(self._store, f"{attempt}/{name}", f"{final}/{name}")

        if not there <= written:
            return True  # another attempt's, whose decision is gone
        with (
            ThreadPoolExecutor(_COPIES, "feedapi-publish") as pool,
            suppress(FileNotFoundError),  # another process is done, and has deleted the attempt
        ):
            return bool(list(pool.map(copy, sorted(written - there))) or there)
        return False

    def delete(self, path: str) -> None:
        below = [f"{path}/{name}" for name in self._below(path)]
        obstore.delete(self._store, below or [path])

    def _below(self, path: str) -> set[str]:
        return {key.removeprefix(f"{path}/") for key in listed(self._store, path)}


Folder = _LocalFolder | _StoreFolder


def open_folder(location: str) -> Folder:
    """Raises `IngestError` where Python can't reach the file system."""
    uri = as_url(location)
    scheme, _, path = uri.partition(":")
    if scheme == "file":
        return _LocalFolder(Path(f"/{unquote(path).lstrip('/')}"))
    if scheme in _OBJECT_STORES:
        return _StoreFolder(uri)
    raise IngestError(
        f"the tables are in {scheme}:, which only the JVM can reach: give s3://, gs://, abfss://, "
        "or a path that is mounted on the driver, such as /Volumes/... or /dbfs/...; or take "
        "format delta, whose tables the JVM writes"
    )


class WrittenFiles(msgspec.Struct, frozen=True):
    """What one attempt wrote to one table: paths in its folder, which may move."""

    table: str
    attempt: str
    final: str


class Decision(msgspec.Struct, frozen=True):
    """The attempt that counts for one micro-batch."""

    tables: list[WrittenFiles]
    taken_over: str = ""
    """The run that goes on in place of the query, which writes nothing more."""
    version: int = VERSION


class Decisions:
    def __init__(self, tables: Mapping[str, ParquetTable], who: Identity) -> None:
        self._tables = tables
        self._who = who
        self._folder = tables["output"].folder
        self._prefix = f"{_COMMITS}/{who.query}"

    def last(self) -> int:
        numbers = filter(str.isdecimal, self._folder.names(self._prefix))
        return max(map(int, numbers), default=-1)

    def find(self, number: int) -> Decision | None:
        if _named(number) not in self._folder.names(self._prefix):
            return None
        text = self._folder.read(f"{self._prefix}/{_named(number)}")
        found = msgspec.json.decode(text, type=Decision)
        if found.version > VERSION:
            raise IngestError(newer_format(f"micro-batch {number}", found.version, VERSION))
        return found

    def decide(self, number: int, own: Decision) -> Decision:
        """Return `own`, or what another attempt decided first."""
        text = msgspec.json.encode(own).decode()
        self._folder.create(f"{self._prefix}/{_named(number)}", text)
        return self.find(number) or own

    def publish(self, number: int, decision: Decision) -> None:
        """Show readers what counts. May be called again, also by several processes at once."""
        output, done = self._tables["output"], f"{_named(number)}{_DONE}"
        if decision.taken_over:
            output.refuse_old_query(self._who, decision.taken_over)
        for one in decision.tables:
            shown = self._tables[one.table].folder.publish(one.attempt, one.final)
            if not shown and done not in self._folder.names(self._prefix):
                raise IngestError(
                    f"the folder {one.attempt} of a micro-batch that counts is not there, and was "
                    "not published: its rows would be missing. Give the table that it was written "
                    "to, restore it, or start over with --resume-from-table"
                )
        self._folder.create(f"{self._prefix}/{done}", "")
        with harmless("old attempts and decisions were not deleted"):
            self._delete(self._folder, self._prefix, number - _KEPT)
            for table in self._tables.values():
                self._delete(table.folder, f"{_ATTEMPTS}/{self._who.query}", number)

    @staticmethod
    def _delete(folder: Folder, path: str, last: int) -> None:
        for name in folder.names(path):
            number = name.removesuffix(_DONE)
            if number.isdecimal() and int(number) <= last:
                folder.delete(f"{path}/{name}")

    def take_over(self, run: str) -> None:
        """Publish what was decided, and decide that the query writes nothing more."""
        number = max(self.last(), 0)
        while not (found := self.decide(number, Decision([], run))).taken_over:
            self.publish(number, found)
            number += 1


def _named(number: int) -> str:
    return f"{number:012d}"


class ParquetTable(Table):
    """One folder. Writing from several queries at once is safe: each has its own folders."""

    @cached_property
    def folder(self) -> Folder:
        return open_folder(self.name)

    def check(self, spark: SparkSession, who: Identity, schema: StructType | None) -> None:
        """As `Table.check`. In Spark Connect the server does so, in the first micro-batch."""
        if is_connect(spark):
            return
        super().check(spark, who, schema)
        self._write_none(spark, schema, who)

    def _write_none(self, spark: SparkSession, schema: StructType | None, who: Identity) -> None:
        """Write no row to a folder beside the checkpoint: Spark says what it would not take."""
        place = f"{self.job.checkpoint_location.rstrip('/')}/feedapi/tried/{self.role}"
        rows = spark.createDataFrame([], schema or StructType().add("n", LongType()))
        none = identified(rows, who, 0)
        writer = none.write.options(**self.job.writer_options, **WRITING).mode("overwrite")
        try:
            writer.parquet(place)  # a file; with folders there is none
            _ = spark.read.schema(none.schema).parquet(place).schema
            if self.partition_by and schema is not None:
                writer.partitionBy(*self.partition_by).parquet(place)
        except Exception as error:  # those of tasks are py4j's
            what = f"{self.name} can't be written: {plain_message(error)}"
            raise IngestError(what) from error
        partitions = {name.lower() for name in self.partition_by}
        for field in schema or ():
            if field.name.lower() in partitions and isinstance(field.dataType, _GUESSED):
                raise IngestError(
                    f"partition_by {field.name}: not every reader gets the same "
                    f"{field.dataType.simpleString()} from the name of a folder: take a column of "
                    "text, numbers or dates"
                )

    def prepare(self, rows: DataFrame, who: Identity, number: int) -> None:  # noqa: ARG002
        spark = rows.sparkSession
        if self._prepared != rows.schema:
            self._compare(spark, rows.schema, who)
            if self.role == "output" and self.job.transform is not None:
                self._write_none(spark, rows.schema, who)  # what it makes was not known before
            self.own(spark, who)
        else:  # another query may have become the owner
            self.is_owner(self.owners(spark, who), who)

    def write(self, rows: DataFrame, who: Identity, number: int) -> WrittenFiles:
        attempt = f"{_ATTEMPTS}/{who.query}/{number}/{uuid.uuid4().hex}"
        writer = rows.write.options(**self.job.writer_options, **WRITING)
        writer.partitionBy(*self.partition_by).parquet(f"{self.name}/{attempt}")
        if self._prepared != rows.schema:
            # Only now: what a write that failed would have noted can't be changed later.
            self._note(rows.sparkSession, rows.schema, who)
            self._prepared = rows.schema
        return WrittenFiles(self.role, attempt, f"{_folder_of(who)}/{who.column('batch')}={number}")

    def _exists(self, spark: SparkSession) -> bool:  # noqa: ARG002
        return bool(self.folder.names(_COLUMNS))

    def owners(
        self,
        spark: SparkSession,  # noqa: ARG002
        who: Identity,
    ) -> dict[str, int]:
        folder = _owners(who)
        numbers = sorted(map(int, filter(str.isdecimal, self.folder.names(folder))))
        return {self.folder.read(f"{folder}/{number}"): number for number in numbers}

    def _add_owner(self, spark: SparkSession, who: Identity, name: str) -> None:
        number = 1 + max(self.owners(spark, who).values(), default=0)
        self.folder.create(f"{_owners(who)}/{number}", name)

    def _holds_rows(self, spark: SparkSession, who: Identity) -> bool:  # noqa: ARG002
        return bool(self.folder.names(_folder_of(who).rpartition("/")[0]))

    def _last_batch(
        self,
        spark: SparkSession,  # noqa: ARG002
        who: Identity,
        after: int,
    ) -> int:
        batch = re.compile(re.escape(who.column("batch")) + r"=(\d+)")  # others are not ours
        found = map(batch.fullmatch, self.folder.names(_folder_of(who)))
        return max((n for one in found if one and (n := int(one[1])) > after), default=-1)

    def _compare(self, spark: SparkSession, schema: StructType | None, who: Identity) -> None:
        _, noted = _columns(spark, self.name)
        if not noted:
            return
        for name, value in {"partition_by": self.partition_by, "prefix": who.prefix}.items():
            if noted[name] != value:
                raise IngestError(
                    f"{self.name} was written with {name} {noted[name]!r}, not {value!r}: files "
                    "of both can't be read as one table. Keep it, or write to another folder"
                )
        exact = str(spark.conf.get("spark.sql.caseSensitive")).lower() == "true"
        fold: Callable[[str], str] = str if exact else str.lower
        self.check_types(
            {fold(name): kind for name, kind in noted["columns"].items()},
            schema,
            fold,
            "column {} was {} and would become {}: files of both can't be read as one table. "
            "Keep the type, or write to another folder",
        )

    def _note(self, spark: SparkSession, schema: StructType, who: Identity) -> None:
        """Note the columns, unless they are: in another file, which tells them all."""
        own = {field.name: field.dataType.simpleString() for field in schema}
        while True:
            self._compare(spark, schema, who)
            number, noted = _columns(spark, self.name)
            known = noted.get("columns", {})
            if own.items() <= known.items():
                return
            columns = {**known, **own}
            note = {"version": VERSION, "partition_by": self.partition_by, "prefix": who.prefix}
            text = json.dumps({**note, "columns": columns})
            self.folder.create(f"{_COLUMNS}/{number + 1}", text)


def _folder_of(who: Identity) -> str:
    return f"{who.column('feed')}={in_folder(who.feed)}/{who.column('query')}={who.query}"


def _owners(who: Identity) -> str:
    return f"{_OWNERS}/feed={in_folder(who.feed)}"


def _columns(spark: SparkSession, folder: str) -> tuple[int, dict[str, Any]]:
    texts = {
        int(name): (text, path)
        for path, text in contents(spark, f"{folder}/{_COLUMNS}", "*").items()
        if (name := path.rpartition("/")[2]).isdecimal()
    }
    number = max(texts, default=-1)
    return number, checked_note(*texts[number]) if texts else {}


def read_table(spark: SparkSession, folder: str) -> DataFrame:
    """Return the rows of a folder of files, with all columns, and values as they were written.

    Spark guesses the type of a value that is in the name of a folder: of `partition_by`, text such
    as ``007`` would be the number 7. The table's own notes say what it is.

    Raises:
        IngestError: `Ingest` did not write the folder.
    """
    folder = folder.rstrip("/")
    _, noted = _columns(spark, folder)
    if not noted:
        raise IngestError(f"{folder} is no table of feedapi ingest: it has no {_COLUMNS}")
    reader, prefix = spark.read.options(**READING), noted["prefix"]
    added: dict[str, DataType] = {
        f"{prefix}feed": StringType(),
        f"{prefix}query": StringType(),
        f"{prefix}batch": LongType(),
    }
    columns, types = noted["columns"], dict(added)
    spelled = {name.lower(): name for name in columns}
    for name in noted["partition_by"]:  # may be written in another case than the column
        own = name if name in columns else spelled[name.lower()]
        types[name] = types[own] = DataType.fromDDL(columns[own])
    try:
        found = list(reader.parquet(folder).schema)
    except AnalysisException as error:
        if error.getCondition() != "UNABLE_TO_INFER_SCHEMA":
            raise
        # No micro-batch left a file: with `partition_by`, one without rows has none.
        kinds = {**{name: DataType.fromDDL(kind) for name, kind in columns.items()}, **added}
        found = [StructField(name, kind) for name, kind in kinds.items()]
    fields = [StructField(field.name, types.get(field.name, field.dataType)) for field in found]
    return reader.schema(StructType(fields)).parquet(folder)
