"""The cluster's ``fs.s3a.*`` settings become the environment of the object store."""

from __future__ import annotations

import pytest

from feedapi_client.spark.registration import s3a_environment

KEYS = {"spark.hadoop.fs.s3a.access.key": "key", "spark.hadoop.fs.s3a.secret.key": "secret"}
AS_VARIABLES = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


def test_keys_become_variables() -> None:
    assert s3a_environment(KEYS, {}) == AS_VARIABLES
    token = {"fs.s3a.session.token": "token"}
    assert s3a_environment({**KEYS, **token}, {}) == {**AS_VARIABLES, "AWS_SESSION_TOKEN": "token"}
    assert s3a_environment({**KEYS, "spark.hadoop.fs.s3a.secret.key": " "}, {}) == {}
    assert s3a_environment({"spark.master": "local", "fs.s3a.fast.upload": "true"}, {}) == {}


@pytest.mark.parametrize(
    "variable",
    ["AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI"],
)
def test_credentials_of_the_environment_come_first_and_are_never_mixed(variable: str) -> None:
    settings = {**KEYS, "fs.s3a.session.token": "token", "fs.s3a.endpoint.region": "eu-north-1"}
    assert s3a_environment(settings, {variable: "own"}) == {"AWS_REGION": "eu-north-1"}
    assert s3a_environment(KEYS, {variable: ""}) == AS_VARIABLES


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"endpoint": "minio:9000"}, {"AWS_ENDPOINT_URL": "https://minio:9000"}),
        (
            {"endpoint": "minio:9000", "connection.ssl.enabled": "false"},
            {"AWS_ENDPOINT_URL": "http://minio:9000", "AWS_ALLOW_HTTP": "true"},
        ),
        (
            {"endpoint": "http://minio:9000"},
            {"AWS_ENDPOINT_URL": "http://minio:9000", "AWS_ALLOW_HTTP": "true"},
        ),
        ({"endpoint": "s3.amazonaws.com"}, {}),
        ({"endpoint": "https://s3.amazonaws.com/"}, {}),
        (
            {"endpoint": "s3.eu-west-1.amazonaws.com"},
            {
                "AWS_ENDPOINT_URL": "https://s3.eu-west-1.amazonaws.com",
                "AWS_REGION": "eu-west-1",
            },
        ),
    ],
)
def test_endpoint_has_the_scheme_and_the_region_that_hadoop_would_use(
    settings: dict[str, str], expected: dict[str, str]
) -> None:
    named = {f"spark.hadoop.fs.s3a.{name}": value for name, value in settings.items()}
    assert s3a_environment(named, {}) == expected


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"])
def test_endpoint_of_the_environment_comes_first(variable: str) -> None:
    settings = {"fs.s3a.endpoint": "http://minio:9000"}
    assert s3a_environment(settings, {variable: "http://own"}) == {}


@pytest.mark.parametrize("variable", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_region_of_the_environment_comes_first(variable: str) -> None:
    assert s3a_environment({"fs.s3a.endpoint.region": "eu-north-1"}, {variable: "own"}) == {}


def test_settings_of_the_bucket_come_first() -> None:
    settings = {
        **KEYS,
        "spark.hadoop.fs.s3a.bucket.lake.access.key": "of-lake",
        "spark.hadoop.fs.s3a.bucket.lake.secret.key": "secret-of-lake",
    }
    of_lake = {"AWS_ACCESS_KEY_ID": "of-lake", "AWS_SECRET_ACCESS_KEY": "secret-of-lake"}
    assert s3a_environment(settings, {}, "s3a://lake/staging") == of_lake
    assert s3a_environment(settings, {}, "s3://lake-2/staging") == AS_VARIABLES
    assert s3a_environment(settings, {}, "gs://lake/staging") == {}
    assert s3a_environment(settings, {}, "/lake") == {}
