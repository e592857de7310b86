"""What a user's ``--transform`` looks like."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812


def only_odd(batch: DataFrame, number: int) -> DataFrame:
    return batch.where("n % 2 = 1").withColumn("in_batch", F.lit(number))


def writes_by_itself(batch: DataFrame, number: int) -> None:
    batch.write.format("noop").mode("append").save()
