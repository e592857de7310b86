"""Registers the source with a session, and gives it the cluster's settings of S3 (``fs.s3a.*``)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from feedapi_client.spark.source import FeedDataSource

_S3 = ("s3://", "s3a://")
_PREFIX = re.compile(r"(?:spark\.hadoop\.)?fs\.s3a\.")
_OWN_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_OWN_ENDPOINT = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_OWN_REGION = ("AWS_REGION", "AWS_DEFAULT_REGION")
_CENTRAL = "s3.amazonaws.com"
"""Hadoop's default endpoint, which says nothing about where the bucket is."""
_REGIONAL = re.compile(r"s3[.-]([a-z0-9-]+)\.amazonaws\.com")


def register(spark: SparkSession, *, staging: str | None = None) -> None:
    """Register ``format("feedapi")`` with a session.

    Its Python processes, on the driver and on executors, then get the session's settings of S3
    (``spark.hadoop.fs.s3a.*``, ``fs.s3a.*``) as ``AWS_*`` variables, where this process has none,
    and not in query plans. Over Spark Connect, whose server has processes of its own, only the
    format is registered.

    Call it again when the settings changed, for queries that start afterwards.

    Arguments:
        staging: the staging location. Its bucket's own settings come first then.
    """
    if is_connect(spark):
        spark.dataSource.register(FeedDataSource)
        return
    context: Any = spark.sparkContext
    # What is registered keeps a copy of this dictionary; other Python functions shall not get it.
    before = dict(context.environment)
    context.environment.update(s3a_environment(spark.conf.getAll, os.environ, staging))
    try:
        spark.dataSource.register(FeedDataSource)
    finally:
        context.environment.clear()
        context.environment.update(before)


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is one of Spark Connect, which has no context."""
    return getattr(spark, "sparkContext", None) is None


def store_settings(spark: SparkSession, location: str) -> dict[str, str]:
    """Return the cluster's settings of S3 for a location, which this process lacks.

    None over Spark Connect, whose server has settings of its own.
    """
    if is_connect(spark) or not location.startswith(_S3):  # for `getAll` takes long
        return {}
    return s3a_environment(spark.conf.getAll, os.environ, location)


def s3a_environment(
    settings: Mapping[str, str], environment: Mapping[str, str], location: str | None = None
) -> dict[str, str]:
    """Return the ``AWS_*`` variables that the settings give and the environment lacks.

    Credentials are taken together or not at all, so that a key of the one never meets a secret of
    the other.

    Arguments:
        settings: of the cluster. Names are those of Hadoop, with or without ``spark.hadoop.``;
            ``fs.s3a.bucket.NAME.*`` of the location's bucket come first. Others are ignored.
        environment: of this process, which comes first.
        location: the staging location. Where it is not on S3, nothing is returned.
    """
    if location is not None and not location.startswith(_S3):
        return {}
    given = _of_bucket(settings, urlsplit(location).netloc if location else "")
    found: dict[str, str] = {}
    if not any(environment.get(name) for name in _OWN_CREDENTIALS):
        found |= _credentials(given)
    if not any(environment.get(name) for name in _OWN_ENDPOINT):
        found |= _endpoint(given)
    if not any(environment.get(name) for name in _OWN_REGION):
        found |= _region(given)
    return found


def _of_bucket(settings: Mapping[str, str], bucket: str) -> dict[str, str]:
    """Return the settings of the bucket, without ``fs.s3a.``."""
    short = {
        _PREFIX.sub("", name, count=1): value.strip()
        for name, value in settings.items()
        if _PREFIX.match(name) and value.strip()
    }
    own = f"bucket.{bucket}."
    return short | {n.removeprefix(own): v for n, v in short.items() if n.startswith(own)}


def _credentials(given: Mapping[str, str]) -> dict[str, str]:
    key, secret = given.get("access.key"), given.get("secret.key")
    if not (key and secret):
        return {}
    found = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret}
    token = given.get("session.token")
    return found | {"AWS_SESSION_TOKEN": token} if token else found


def _endpoint(given: Mapping[str, str]) -> dict[str, str]:
    endpoint = given.get("endpoint")
    if not endpoint or endpoint.rpartition("//")[2].rstrip("/") == _CENTRAL:
        return {}
    if "://" not in endpoint:
        encrypted = given.get("connection.ssl.enabled", "true").lower() != "false"
        endpoint = f"{'https' if encrypted else 'http'}://{endpoint}"
    found = {"AWS_ENDPOINT_URL": endpoint}
    return found | {"AWS_ALLOW_HTTP": "true"} if endpoint.startswith("http://") else found


def _region(given: Mapping[str, str]) -> dict[str, str]:
    region = given.get("endpoint.region")
    if not region:
        host = given.get("endpoint", "").rpartition("//")[2].rstrip("/")
        regional = _REGIONAL.fullmatch(host)
        region = regional[1] if regional else None
    return {"AWS_REGION": region} if region else {}
